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
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.utils import RepeatSampler, split_pixel_values_by_grid, unsplit_pixel_values_by_grid

from ..objective import BatchInfo
from .forward import row_lengths
from .layout import CostModel, RowLength, balanced_parts, balanced_ranks, exactly

Batch = dict[str, Any]


def response_mask(batch: Batch) -> Tensor:
    """`(B, T)`, 1 where a token is trained on: of the completion, not a tool's output, not a masked row's."""
    mask = batch["completion_mask"]
    return mask * batch["tool_mask"].bool() if "tool_mask" in batch else mask


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
        """Split a generation batch and count it; the same collectives on every rank, whatever the data.

        Args:
            batch: TRL's scored generation batch of this rank.
            accelerator: exchanges rows and gathers the counts.
        """
        free = self.group is not None  # a setting and never the data, so that all ranks agree
        rows = len(batch["completion_ids"])
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        lengths = row_lengths(attention, batch["completion_ids"].size(1))
        first = accelerator.process_index * rows
        batch["row_index"] = torch.arange(first, first + rows, device=attention.device)  # as generated
        spared = [False] * rows
        if self.spare_zero_advantages:
            spared = (batch["advantages"].view(rows, -1) == 0).all(1).tolist()
        per_window = rows // self.steps_per_generation * self.accumulation
        windows = [list(range(first, first + per_window)) for first in range(0, rows, per_window)]
        if free and accelerator.num_processes > 1:
            batch, lengths, spared, windows = self._exchange(batch, lengths, spared, windows, accelerator)

        parts: list[list[int]] = []
        for window in windows:
            if free:
                costs = [self._cost_of(lengths[i], spared[i]) for i in window]
                chosen = balanced_parts([lengths[i] for i in window], self.accumulation, costs)
                parts += [[window[i] for i in part] for part in chosen]
            else:
                size = per_window // self.accumulation
                parts += [window[i : i + size] for i in range(0, per_window, size)]
        split = split_pixel_values_by_grid(batch)
        micro_batches = [unsplit_pixel_values_by_grid(take_rows(split, part)) for part in parts]
        plans: list[ForwardPlan | None] = [None] * len(parts)
        if free:
            plans = [self._plan([lengths[i] for i in part], [spared[i] for i in part]) for part in parts]
            micro_batches = [trimmed(micro, plan.lengths) for micro, plan in zip(micro_batches, plans, strict=True)]
        return self._counted(micro_batches, plans, accelerator)

    def _exchange(
        self,
        batch: Batch,
        lengths: list[RowLength],
        spared: list[bool],
        windows: list[list[int]],
        accelerator: Accelerator,
    ) -> tuple[Batch, list[RowLength], list[bool], list[list[int]]]:
        """Swap rows between ranks, inside each optimizer step, so that all ranks have about the same to do."""
        rows, rank, ranks = len(lengths), accelerator.process_index, accelerator.num_processes
        table = torch.tensor([[*n, s] for n, s in zip(lengths, spared, strict=True)], device=accelerator.device)
        everywhere = accelerator.gather(table).tolist()  # row i of rank r is at r * rows + i
        mine: list[list[int]] = []
        for window in windows:
            members = [r * rows + i for r in range(ranks) for i in window]
            costs = [self._cost_of(RowLength(*everywhere[i][:2]), bool(everywhere[i][2])) for i in members]
            mine.append([members[i] for i in balanced_ranks(costs, ranks, self.accumulation)[rank]])
        gathered = {name: gathered_rows(name, batch[name], accelerator) for name in sorted(batch)}
        batch = take_rows(gathered, [i for window in mine for i in window])
        lengths = [RowLength(*everywhere[i][:2]) for window in mine for i in window]
        spared = [bool(everywhere[i][2]) for window in mine for i in window]
        ends = [sum(len(window) for window in mine[: k + 1]) for k in range(len(mine))]
        return batch, lengths, spared, [list(range(end - len(w), end)) for end, w in zip(ends, mine, strict=True)]

    def _cost_of(self, length: RowLength, spared: bool) -> float:
        # A backward costs about two forwards
        share = 1.0 if not spared else 1 / 3 if self.observe_spared else 0.0
        return share * self.cost.row(length.total)

    @staticmethod
    def _counted(micro_batches: list[Batch], plans: list[ForwardPlan | None], accelerator: Accelerator) -> Rollout:
        """Count tokens and rows over ranks, and let all ranks run equally many forwards."""
        tokens = torch.stack([response_mask(micro).sum() for micro in micro_batches])
        sizes = [len(micro["completion_ids"]) for micro in micro_batches]
        known = [
            [size, len(plan.train) if plan else 0, len(plan.observe) if plan else 0]
            for size, plan in zip(sizes, plans, strict=True)
        ]
        table = torch.cat([tokens.long()[:, None], torch.tensor(known, device=tokens.device)], 1)
        everywhere = accelerator.gather(table[None])  # (ranks, micro-batches, 4)
        if accelerator.num_processes > 1:
            # Sharded weights and broadcast buffers are gathered in each forward: all ranks must run equally many
            for plan, (train, observe) in zip(plans, everywhere[..., 2:].amax(0).tolist(), strict=True):
                if plan is not None:
                    plan.train, plan.observe = exactly(plan.train, train), exactly(plan.observe, observe)
        return Rollout(
            micro_batches, plans, everywhere[..., 0].sum(0), everywhere[..., 1].sum(0), accelerator.num_processes
        )

    def _plan(self, lengths: list[RowLength], spare: list[bool]) -> ForwardPlan:
        def grouped(wanted: list[int]) -> list[list[int]]:
            return [[wanted[i] for i in group] for group in self.group([lengths[i] for i in wanted])]

        train = grouped([i for i, spared in enumerate(spare) if not spared])
        observe = grouped([i for i, spared in enumerate(spare) if spared]) if self.observe_spared else []
        # Without any row to train on, a backward still needs a graph
        return ForwardPlan(lengths, train or [[]], observe, sum(spare))


def gathered_rows(name: str, value: Any, accelerator: Accelerator) -> Any:
    """All ranks' rows of one entry of a batch, rank by rank; scalars and `None` as they are."""
    if isinstance(value, list):
        return gather_object(value)
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.ndim > 1:
        value = accelerator.pad_across_processes(value, dim=1, pad_first=name.startswith("prompt_"))
    return accelerator.gather(value)


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
    prompt = max(1, *(n.prompt for n in lengths))
    completion = max(1, *(n.completion for n in lengths))
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
    epoch sees the first one's prompts again. Here a run of any history sees the order of an uninterrupted one (README,
    departure 16).
    """

    epoch = 0

    def __iter__(self):
        if self.shuffle:
            self.generator.manual_seed(self.seed)
            for _ in range(self.epoch):
                torch.randperm(self.num_samples, generator=self.generator)
        return super().__iter__()


def equally_many(groups: list[list[int]], accelerator: Accelerator) -> list[list[int]]:
    """This rank's rows in as many groups as the rank with most has; call it on every rank.

    Sharded weights and broadcast buffers are gathered in each forward: all ranks must run equally many.
    """
    if accelerator.num_processes == 1:
        return groups
    count = torch.tensor([len(groups)], device=accelerator.device)
    return exactly(groups, accelerator.gather(count).max().item())
