"""Optimizer-step windows: which micro-batches of a generation batch make one optimizer step, and their counts.

A generation batch is split, on every rank, into `steps_per_generation` micro-batches; each
`gradient_accumulation_steps` of them in turn are one window, that is, one optimizer step. The objective divides by
counts over the whole window on all ranks, so the counts must be known before the window's first backward.
"""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.utils import RepeatSampler, split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

from ..objective import BatchInfo

Batch = dict[str, Any]


def response_mask(batch: Batch) -> Tensor:
    """`(B, T)`, 1 where a token is trained on: of the completion, not a tool's output, not a masked row's."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass
class Rollout:
    """A scored generation batch on this rank, split into micro-batches, with counts over all ranks.

    Attributes:
        micro_batches: `steps_per_generation` of them, in the order they are trained on.
        tokens: `(steps_per_generation,)`, valid tokens of each micro-batch, summed over ranks.
        rows: `(steps_per_generation,)`, rows of each micro-batch, summed over ranks.
        dp_size: number of ranks.
    """

    micro_batches: list[Batch]
    tokens: Tensor
    rows: Tensor
    dp_size: int

    @classmethod
    def split(cls, batch: Batch, steps_per_generation: int, accelerator: Accelerator) -> "Rollout":
        """Split a generation batch in order and count it; one collective, on every rank, whatever the data.

        Args:
            batch: TRL's scored generation batch of this rank.
            steps_per_generation: number of micro-batches; divides the rows.
            accelerator: reduces the counts over ranks.
        """
        parts = split_tensor_dict(split_pixel_values_by_grid(batch), steps_per_generation)
        micro_batches = [unsplit_pixel_values_by_grid(part) for part in parts]
        masks = [response_mask(part) for part in micro_batches]
        counts = torch.stack(
            [torch.stack([mask.sum() for mask in masks]), torch.tensor([len(m) for m in masks]).to(masks[0].device)]
        )
        counts = accelerator.reduce(counts.long(), reduction="sum")
        return cls(micro_batches, counts[0], counts[1], accelerator.num_processes)

    def state(self) -> dict[str, Any]:
        """What a checkpoint inside the generation cycle keeps of it: plain containers and tensors."""
        return {
            "micro_batches": self.micro_batches,
            "tokens": self.tokens,
            "rows": self.rows,
            "dp_size": self.dp_size,
        }

    def micro_batch(self, index: int, accumulation: int, in_window: int) -> tuple[Batch, BatchInfo]:
        """A micro-batch and the counts of the optimizer step that it belongs to.

        Args:
            index: of the micro-batch, in `[0, steps_per_generation)`.
            accumulation: `gradient_accumulation_steps`; windows start at its multiples.
            in_window: micro-batches that the window really has; less than `accumulation` in the short last window of
                an epoch.
        """
        start = index - index % accumulation
        window = slice(start, start + in_window)
        counts = BatchInfo(self.dp_size, self.tokens[window].sum(), self.rows[window].sum())
        return self.micro_batches[index], counts


class EpochSampler(RepeatSampler):
    """TRL's sampler, whose order in an epoch depends on the epoch alone and not on how often it was iterated.

    TRL's draws each epoch's order from a generator that a resumed run starts anew, so that a run resumed in its second
    epoch sees the first one's prompts again. Here a run of any history sees the order of an uninterrupted one.
    """

    epoch = 0

    def __iter__(self):
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()
