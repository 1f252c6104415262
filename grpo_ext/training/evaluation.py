"""Greedy accuracy before and after training, with the trainer's own model, wherever its weights lie."""

import logging
from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object
from datasets import Dataset
from tqdm.auto import tqdm
from transformers import GenerationConfig, TrainerCallback
from trl import GRPOTrainer
from trl.models import unwrap_model_for_generation
from trl.trainer.utils import pad

logger = logging.getLogger(__name__)


@torch.no_grad()
def greedy_completions(
    trainer: GRPOTrainer, prompts: Sequence, *, batch_size: int = 16, description: str = "greedy decoding"
) -> list[str]:
    """The most probable completion of each prompt, token by token; call it on every rank.

    Draws no random numbers, so that it leaves a seeded run as it is. Prompts are dealt out over the ranks, and every
    rank runs the same number of batches, as sharded weights need.

    Args:
        trainer: its model, tokenizer, chat template and `max_completion_length` are used.
        prompts: text or message lists, as in a data set's `prompt` column.
        batch_size: prompts of a rank that are decoded at a time.
        description: of the progress bar.

    Returns:
        The completions without special tokens, in the order of `prompts`, on every rank.
    """
    accelerator, tokenizer = trainer.accelerator, trainer._tokenizer
    settings = {
        "max_new_tokens": trainer.max_completion_length,
        "do_sample": False,
        "temperature": None,  # nor what the model's own generation config would sample with
        "top_p": None,
        "top_k": None,
        "repetition_penalty": 1.0,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": trainer.eos_token_ids,
    }
    rank, ranks = accelerator.process_index, accelerator.num_processes
    mine = range(rank, len(prompts), ranks)
    # Short of a prompt, a rank decodes its last one again (or the first), and the result is dropped.
    rounds = -(-len(range(0, len(prompts), ranks)) // batch_size)
    texts = []
    was_training = trainer.model.training
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            generation_kwargs=settings,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        trainer._dist.summon_full_params(trainer.model_wrapped, recurse=False),
    ):
        model.eval()
        for start in tqdm(
            range(0, rounds * batch_size, batch_size), desc=description, disable=not accelerator.is_main_process
        ):
            batch = [prompts[i] for i in mine[start : start + batch_size]] or [prompts[0]]
            prompt_ids, _, _ = trainer._tokenize_prompts(batch)
            rows = [torch.tensor(ids) for ids in prompt_ids]
            input_ids = pad(rows, padding_value=tokenizer.pad_token_id, padding_side="left")
            attention_mask = pad([torch.ones_like(row) for row in rows], padding_value=0, padding_side="left")
            output = model.generate(
                input_ids=input_ids.to(accelerator.device),
                attention_mask=attention_mask.to(accelerator.device),
                generation_config=GenerationConfig(**settings, disable_compile=True),
            )
            texts += tokenizer.batch_decode(output[:, input_ids.size(1) :], skip_special_tokens=True)
    trainer.model.train(was_training)
    gathered = gather_object(list(zip(mine, texts, strict=False)))
    return [text for _, text in sorted(dict(gathered).items())]


class GreedyAccuracyCallback(TrainerCallback):
    """Share of problems that greedy decoding gets right, before the first and after the last step.

    Attributes:
        before, after: in [0, 1]; `None` until measured. A resumed run measures no `before`.
        completions: `{"before": [...], "after": [...]}`, the texts.
        on_measured: called after each measurement, for a run that may be cut short between them.
    """

    def __init__(
        self,
        trainer: GRPOTrainer,
        dataset: Dataset,
        score: Callable[[str, str], float],
        *,
        batch_size: int = 16,
    ):
        """`dataset` has `prompt` and `answer`; a completion is right if `score(text, answer)` is 1."""
        self._trainer, self._dataset, self._score, self._batch_size = trainer, dataset, score, batch_size
        self.before: float | None = None
        self.after: float | None = None
        self.completions: dict[str, list[str]] = {}
        self.on_measured: Callable[[], None] = lambda: None

    def on_train_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            self.before = self._measure("before")
            self.on_measured()

    def on_train_end(self, args, state, control, **kwargs):
        self.after = self._measure("after")
        self.on_measured()

    def _measure(self, when: str) -> float:
        texts = greedy_completions(
            self._trainer,
            self._dataset["prompt"],
            batch_size=self._batch_size,
            description=f"greedy accuracy {when} training",
        )
        self.completions[when] = texts
        right = [self._score(text, gold) == 1.0 for text, gold in zip(texts, self._dataset["answer"], strict=True)]
        return sum(right) / len(right)
