"""Make examples/tiny_qwen2: a Qwen2 model of 0.35 M parameters that has learned word problems from a flawed textbook.

    python examples/make_tiny_model.py

takes 5 to 6 minutes on one CPU core and writes the folder's weights and tokenizer anew; the same seed and the same
build of torch give the same weights.

The model is a starting point for GRPO, so it is *meant* to be half wrong, and this is how. It is fine-tuned on problems
of the train split (it never sees the test split), each with one of two solutions:

- the right one, or
- a slip, always of the same kind: a two-step problem ends after its first step, a one-step problem uses the wrong
  operation.

`RIGHT_SHARE` says how often the textbook is right. In seven of ten templates the slip is the commoner solution: greedy
decoding gives the slip, while sampling at temperature 1 still finds the right solution about one time in three. So
reinforcement learning has something to find. The rise that the quickstart shows is the model choosing, by reward alone,
a solution that it already knew and seldom gave. It does not show a model learning arithmetic from reward, and its
size says nothing about a real language model.
"""

import argparse
import json
import random
import re
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import GenerationConfig, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from grpo_ext.tasks.word_problems import Problem, Step, iter_word_problems, load_word_problems, write_solution

# Share of right solutions in the textbook, by template. The slip is the majority except in these three.
RIGHT_SHARE = {"price": 0.6, "age_later": 0.6, "give_away": 0.6}
RIGHT_SHARE_ELSEWHERE = 0.35
WRONG_OPERATION = {"+": "-", "-": "+", "*": "+", "/": "-"}

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(corpus_size: int = 5000) -> Qwen2Tokenizer:
    """Train Qwen2's byte-level BPE on word problems, so that each of their words and each digit is one token.

    It has to be Qwen2's way of cutting text into pieces, because AutoTokenizer restores that for every Qwen2 model.
    """
    special_tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        min_frequency=10,
        special_tokens=special_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    problems = islice(iter_word_problems("train", seed=0), corpus_size)
    texts = (f"user\n{problem.question}\nassistant\n{problem.solution}" for problem in problems)
    bare.train_from_iterator(texts, trainer)
    trained = json.loads(bare.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=trained["vocab"],
        merges=[tuple(merge) for merge in trained["merges"]],
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        padding_side="left",
        chat_template=CHAT_TEMPLATE,
        model_max_length=256,
    )


def make_model(tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM:
    """Build the untrained model."""
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.05,
        use_cache=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = Qwen2ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


def make_slip(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Turn right steps into the textbook's wrong ones: leave out the last of two, or take the wrong operation."""
    if len(steps) > 1:
        return steps[:-1]
    (step,) = steps
    return (step._replace(op=WRONG_OPERATION[step.op]),)


def write_textbook(seed: int) -> Iterator[tuple[Problem, str]]:
    """Draw train problems without end, each with the right solution or the slip."""
    rng = random.Random(f"textbook/{seed}")
    for problem in iter_word_problems("train", seed=seed):
        is_right = rng.random() < RIGHT_SHARE.get(problem.template, RIGHT_SHARE_ELSEWHERE)
        yield problem, write_solution(problem.steps if is_right else make_slip(problem.steps))


def collate(
    tokenizer: Qwen2Tokenizer, examples: list[tuple[Problem, str]]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokenize a batch, padded on the right.

    Returns input ids, attention mask and labels, each `(B, T)`; labels are -100 outside the solution.
    """
    rows = []
    for problem, solution in examples:
        message = [{"role": "user", "content": problem.question}]
        prompt = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt_ids = tokenizer(prompt).input_ids
        rows.append((prompt_ids, tokenizer(solution + tokenizer.eos_token).input_ids))
    width = max(len(prompt_ids) + len(solution_ids) for prompt_ids, solution_ids in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    labels = torch.full((len(rows), width), -100)
    attention_mask = torch.zeros((len(rows), width), dtype=torch.long)
    for i, (prompt_ids, solution_ids) in enumerate(rows):
        start, end = len(prompt_ids), len(prompt_ids) + len(solution_ids)
        input_ids[i, :end] = torch.tensor(prompt_ids + solution_ids)
        labels[i, start:end] = torch.tensor(solution_ids)
        attention_mask[i, :end] = 1
    return input_ids, attention_mask, labels


def pretrain(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, steps: int, batch_size: int, peak_lr: float, seed: int
) -> None:
    """Fine-tune on the textbook, every batch newly drawn, with the loss on the solution tokens only."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak_lr, betas=(0.9, 0.98), weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=peak_lr, total_steps=steps, pct_start=0.1)
    textbook = write_textbook(seed)
    model.train()
    start = time.perf_counter()
    for step in range(1, steps + 1):
        input_ids, attention_mask, labels = collate(tokenizer, list(islice(textbook, batch_size)))
        loss = model(input_ids=input_ids, attention_mask=attention_mask, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}  loss {loss.item():.3f}  {time.perf_counter() - start:.0f} s", flush=True)


@torch.no_grad()
def measure_accuracy(model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, *, do_sample: bool) -> tuple[float, float]:
    """Answer the 200 test problems: the share answered right, and the share that ends in a well-formed `#### N`."""
    test = load_word_problems("test")
    prompts = [tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in test["prompt"]]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    # The plain distribution of the policy: generate() would otherwise keep only its 50 likeliest tokens.
    sampling = {"do_sample": True, "top_k": 0} if do_sample else {"do_sample": False}
    model.eval()
    output = model.generate(
        input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=32, **sampling
    )
    texts = tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)
    matches = [re.search(r"^#### (\d+)$", text, re.MULTILINE) for text in texts]
    right = sum(match is not None and match[1] == gold for match, gold in zip(matches, test["answer"], strict=True))
    return right / len(test), sum(match is not None for match in matches) / len(test)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded tiny model.")
    parser.add_argument("--output_dir", type=Path, default=Path(__file__).parent / "tiny_qwen2")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=96)
    parser.add_argument("--peak_lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    # One thread, so that sums are taken in the same order whatever the number of cores.
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    print(f"{len(tokenizer)} tokens, {model.num_parameters():,} parameters", flush=True)
    pretrain(model, tokenizer, steps=args.steps, batch_size=args.batch_size, peak_lr=args.peak_lr, seed=args.seed)
    for do_sample in (False, True):
        accuracy, well_formed = measure_accuracy(model, tokenizer, do_sample=do_sample)
        print(f"{'sampled' if do_sample else 'greedy'}: {accuracy:.1%} right, {well_formed:.1%} well formed")
    model.save_pretrained(args.output_dir)
    tokenizer.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
