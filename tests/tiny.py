"""A model of two small layers, a tokenizer of a few words and fixed uneven responses, for tests of the trainer."""

import random
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

WORDS = [f"w{i}" for i in range(58)]
SPECIAL = ["<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<bos>"]
LONGEST = 40
EXAMPLES = Path(__file__).parent.parent / "examples"

# Of a trainer on fixed responses: no scheduling, logs of every step, nothing saved or drawn
SETTINGS = {
    "num_generations": 4,
    "max_completion_length": LONGEST,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "activation_checkpointing": False,
    "use_cpu": True,
    "disable_tqdm": True,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """64 words, `<pad>` apart from `<eos>`, a chat template of one line."""
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tok = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
    )
    tok.chat_template = (
        "{% for m in messages %}<{{ m.role }}> {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    return tok


def model(seed: int = 0, **settings) -> Qwen2ForCausalLM:
    """A random Qwen2 of two layers of width 16, in memory, with no name to reload it by."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        **{
            "vocab_size": 64,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 128,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": 1,
            "pad_token_id": 0,
            **settings,
        }
    )
    net = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.normal_(0, 0.3) if parameter.ndim > 1 else parameter.add_(0.1 * torch.randn_like(parameter))
    return net


def prompts(count: int = 8) -> Dataset:
    """Prompts of 2 to 7 words, told apart by their first word."""
    words = [[WORDS[i], *(WORDS[(i * 7 + j) % len(WORDS)] for j in range(1 + i % 6))] for i in range(count)]
    return Dataset.from_dict({"prompt": [" ".join(row) for row in words], "number": list(range(count))})


def response(prompt: str, copy: int) -> list[int]:
    """The fixed response number `copy` to a prompt: 1 to 40 tokens, every second one ends with `<eos>`."""
    draw = random.Random(f"{prompt}/{copy}")
    length = draw.choice([1, 2, 3, 5, 8, 13, 21, 30, LONGEST])
    tokens = [draw.randrange(len(SPECIAL), 64) for _ in range(length)]
    return [*tokens[:-1], 1] if draw.random() < 0.5 else tokens


def fixed_rollout(listed_prompts, trainer, tool_mask: bool = False) -> dict:
    """A `rollout_func` whose responses depend on nothing but the prompt and which copy of it this is."""
    tok = trainer.processing_class
    seen: dict[str, int] = {}
    completions = []
    # The copies of a prompt may lie on several ranks: number them through the whole generation batch
    rank, rows = trainer.accelerator.process_index, len(listed_prompts)
    for offset, prompt in enumerate(listed_prompts):
        seen.setdefault(prompt, (rank * rows + offset) % trainer.num_generations)
        completions.append(response(prompt, seen[prompt]))
        seen[prompt] += 1
    output = {
        "prompt_ids": [tok(prompt)["input_ids"] for prompt in listed_prompts],
        "completion_ids": completions,
        "logprobs": [[0.0] * len(ids) for ids in completions],
    }
    if tool_mask:  # every third token is a tool's
        output["env_mask"] = [[int(i % 3 != 1) for i in range(len(ids))] for ids in completions]
    return output


def length_reward(prompts, completions, completion_ids, **kwargs) -> list[float]:
    """Uneven, of both signs relative to the group, and a function of the response alone."""
    return [len(ids) % 7 + 0.1 * (ids[0] % 5) for ids in completion_ids]
