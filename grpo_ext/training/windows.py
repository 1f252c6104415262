"""Optimizer-step windows: which rows of a generation batch make one optimizer step, how they are split, their counts.

On every rank a generation batch is trained on in `steps_per_generation` micro-batches; each
`gradient_accumulation_steps` of them in turn are one window, that is, one optimizer step. The objective divides by
counts over the whole window on all ranks, so the counts are made before the window's first backward. They also make the
split inside a window free: its rows are dealt out by cost, and the gradient stays the same.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from trl.trainer.utils import RepeatSampler, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..objective import BatchInfo
from .forward import row_lengths
from .layout import CostModel, RowLength, balanced_parts, exactly

Batch = dict[str, Any]


def response_mask(batch: Batch) -> Tensor:
    """`(B, T)`, 1 where a token is trained on: of the completion, not a tool's output, not a masked row's."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"] if "tool_mask" in batch else mask


@dataclass
class ForwardPlan:
    """Which rows of a micro-batch share a forward.

    Attributes:
        lengths: tokens of each row.
        train: rows of each forward that is backpropagated; empty groups run because another rank needs one more.
        observe: rows of each forward that only metrics need.
        spared: rows that are not backpropagated, since their loss is 0 whatever the parameters.
    """

    lengths: list[RowLength]
    train: list[list[int]]
    observe: list[list[int]] = field(default_factory=list)
    spared: int = 0


@dataclass
class Rollout:
    """A scored generation batch on this rank, split into micro-batches, with counts over all ranks.

    Attributes:
        micro_batches: `steps_per_generation` of them, in the order they are trained on.
        plans: of their forwards; `None` where TRL's padded forward is used.
        tokens: `(steps_per_generation,)`, valid tokens of each micro-batch, summed over ranks.
        rows: `(steps_per_generation,)`, rows of each micro-batch, summed over ranks.
        dp_size: number of ranks.
    """

    micro_batches: list[Batch]
    plans: list[ForwardPlan | None]
    tokens: Tensor
    rows: Tensor
    dp_size: int

    def state(self) -> dict[str, Any]:
        """What a checkpoint inside the generation cycle keeps of it: plain containers and tensors."""
        return {
            "micro_batches": self.micro_batches,
            "plans": [None if plan is None else asdict(plan) for plan in self.plans],
            "tokens": self.tokens,
            "rows": self.rows,
            "dp_size": self.dp_size,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Rollout":
        """The inverse of `state`."""
        plans = [
            None if plan is None else ForwardPlan(**{**plan, "lengths": [RowLength(*n) for n in plan["lengths"]]})
            for plan in state["plans"]
        ]
        return cls(**{**state, "plans": plans})

    def micro_batch(self, index: int, accumulation: int, in_window: int) -> Batch:
        """A micro-batch, with the counts of its optimizer step as `batch_info` and its forwards as `plan`.

        Args:
            index: of the micro-batch, in `[0, steps_per_generation)`.
            accumulation: `gradient_accumulation_steps`; windows start at its multiples.
            in_window: micro-batches that the window really has; less than `accumulation` in the short last window of
                an epoch.
        """
        start = index - index % accumulation
        window = slice(start, start + in_window)
        counts = BatchInfo(self.dp_size, self.tokens[window].sum(), self.rows[window].sum())
        return {**self.micro_batches[index], "batch_info": counts, "plan": self.plans[index]}


@dataclass(frozen=True)
class Splitter:
    """How generation batches become micro-batches.

    Attributes:
        steps_per_generation: micro-batches of a generation batch.
        accumulation: micro-batches of an optimizer step.
        cost: what a row costs.
        group: from row lengths to groups that share a forward; `None`: TRL's padded forward, rows in their order.
        spare_zero_advantages: whether a row with advantage 0 has no gradient.
        observe_spared: whether metrics need such a row's log-probs all the same.
    """

    steps_per_generation: int
    accumulation: int
    cost: CostModel
    group: Callable[[list[RowLength]], list[list[int]]] | None
    spare_zero_advantages: bool
    observe_spared: bool

    def split(self, batch: Batch, accelerator: Accelerator) -> Rollout:
        """Split a generation batch and count it; one collective, on every rank, whatever the data.

        Args:
            batch: TRL's scored generation batch of this rank.
            accelerator: gathers the counts.
        """
        free = self.group is not None and "pixel_values" not in batch
        rows = len(batch["completion_ids"])
        per_step = rows // self.steps_per_generation
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        lengths = row_lengths(attention, batch["completion_ids"].size(1))
        zero = (batch["advantages"].view(rows, -1) == 0).all(1).tolist()
        parts: list[list[int]] = []
        for first in range(0, rows, per_step * self.accumulation):
            window = list(range(first, first + per_step * self.accumulation))
            if free:
                chosen = balanced_parts([lengths[i] for i in window], self.accumulation, self.cost)
                parts += [[window[i] for i in part] for part in chosen]
            else:
                parts += [window[i : i + per_step] for i in range(0, len(window), per_step)]

        split = split_pixel_values_by_grid(batch)
        micro_batches = [unsplit_pixel_values_by_grid(take_rows(split, part)) for part in parts]
        plans: list[ForwardPlan | None] = [None] * len(parts)
        if free:
            micro_batches = [
                trimmed(micro, [lengths[i] for i in p]) for micro, p in zip(micro_batches, parts, strict=True)
            ]
            plans = [self._plan([lengths[i] for i in part], [zero[i] for i in part]) for part in parts]

        counts = torch.stack([response_mask(micro).sum() for micro in micro_batches])
        known = [
            [len(part), len(p.train) if p else 0, len(p.observe) if p else 0]
            for part, p in zip(parts, plans, strict=True)
        ]
        table = torch.cat([counts.long()[:, None], torch.tensor(known, device=counts.device)], 1)
        everywhere = accelerator.gather(table[None])  # (ranks, micro-batches, 4)
        if accelerator.num_processes > 1 and free:
            # Sharded weights and broadcast buffers are gathered in each forward: all ranks must run equally many
            for plan, (train, observe) in zip(plans, everywhere[..., 2:].amax(0).tolist(), strict=True):
                plan.train, plan.observe = exactly(plan.train, train), exactly(plan.observe, observe)
        return Rollout(
            micro_batches, plans, everywhere[..., 0].sum(0), everywhere[..., 1].sum(0), accelerator.num_processes
        )

    def _plan(self, lengths: list[RowLength], zero: list[bool]) -> ForwardPlan:
        spare = [self.spare_zero_advantages and z for z in zero]

        def grouped(wanted: list[int]) -> list[list[int]]:
            return [[wanted[i] for i in group] for group in self.group([lengths[i] for i in wanted])]

        train = grouped([i for i, spared in enumerate(spare) if not spared])
        observe = grouped([i for i, spared in enumerate(spare) if spared]) if self.observe_spared else []
        # Without any row to train on, a backward still needs a graph
        return ForwardPlan(lengths, train or [[]], observe, sum(spare))


def take_rows(batch: Batch, rows: list[int]) -> Batch:
    """These rows of every tensor and list of a batch; scalars and `None` are shared."""
    index = torch.tensor(rows)

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value if value.ndim == 0 else value[index.to(value.device)]
        return [value[i] for i in rows] if isinstance(value, list) else value

    return {name: take(value) for name, value in batch.items()}


def trimmed(batch: Batch, lengths: list[RowLength]) -> Batch:
    """The batch without columns that are padding in all its rows: prompts on the left, completions on the right."""
    prompt = max(1, *(n.prompt for n in lengths), 1)
    completion = max(1, *(n.completion for n in lengths), 1)
    width = batch["completion_ids"].size(1)

    def trim(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim < 2:
            return value
        if name.startswith("prompt_"):
            return value[:, -prompt:]
        return value[:, :completion] if value.size(1) == width else value

    return {name: trim(name, value) for name, value in batch.items()}


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
