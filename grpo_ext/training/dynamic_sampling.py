"""DAPO's dynamic sampling: groups whose responses all score alike teach nothing, and are replaced by further prompts.

Sources: Yu et al. 2025, arXiv:2503.14476, section 3.2; verl 0.9.1, `algorithm.filter_groups`.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, IterableDataset
from torch import Tensor

from .config import GRPOVerlConfig
from .scoring import Sampled
from .windows import Batch, gathered_rows, response_mask, take_rows

logger = logging.getLogger(__name__)

SUMMED = "reward"
Row = tuple[int, int]  # the try, and the number of the row among all ranks' rows of it


class PromptStream:
    """Further prompts of a dataset, in a shuffled order of its own, epoch after epoch; the same on every rank."""

    def __init__(self, dataset: Dataset | IterableDataset, seed: int, columns: list[str] | None = None):
        """`columns` are those that a prompt keeps; `None`: all."""
        self._dataset, self._columns = dataset, columns
        # Not the order of the sampler: its next prompts would be sampled twice, and near to each other
        self._seed = seed + 1_000_003
        self.load_state(None)

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next prompts, with their other columns.

        Raises:
            ValueError: the dataset is empty.
        """
        if self._rows is None:
            self._rows = self._epoch_rows()
            next(islice(self._rows, self._position, self._position), None)
        taken = []
        while len(taken) < count:
            row = next(self._rows, None)
            if row is None:
                if self._position == 0:
                    raise ValueError("filter_groups finds no further prompts: train_dataset is empty")
                self._epoch, self._position = self._epoch + 1, 0
                self._rows = self._epoch_rows()
                continue
            self._position += 1
            taken.append({name: row[name] for name in self._columns if name in row} if self._columns else row)
        return taken

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps: how far it was read."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state(self, state: dict[str, int] | None) -> None:
        """Go on from a checkpoint's; `None`: start anew."""
        self._epoch, self._position = (state["epoch"], state["position"]) if state else (0, 0)
        self._rows: Iterator[dict[str, Any]] | None = None

    def _epoch_rows(self) -> Iterator[dict[str, Any]]:
        if isinstance(self._dataset, IterableDataset):
            return iter(self._dataset.shuffle(seed=self._seed + self._epoch))
        generator = torch.Generator().manual_seed(self._seed + self._epoch)
        order = torch.randperm(len(self._dataset), generator=generator).tolist()
        return (self._dataset[i] for i in order)


class DynamicSampler:
    """Samples generation batches until one is full of groups that differ in a metric, or the tries are used up.

    The reward metrics that TRL logs stay those of all sampled responses; the completions table has the batch's.
    """

    def __init__(
        self,
        args: GRPOVerlConfig,
        stream: PromptStream,
        total: Callable[[Tensor], Tensor],
        reward_names: list[str],
        accelerator: Accelerator,
    ):
        """`total` gives the summed reward `(N,)` of the functions' rewards `(N, functions)`.

        Raises:
            ValueError: `filter_groups_metric` is the name of no reward function.
        """
        self.stream = stream
        self._metric, self._most = args.filter_groups_metric, args.max_num_gen_batches
        self._size, self._accelerator = args.num_generations, accelerator
        self._values = total
        if self._metric != SUMMED:
            if self._metric not in reward_names:
                raise ValueError(
                    f"filter_groups_metric={self._metric!r} is no reward function; choose {SUMMED!r} or one of "
                    f"{', '.join(reward_names)}"
                )
            column = reward_names.index(self._metric)
            self._values = lambda rewards: rewards[:, column]
        self._warned = False

    def fill(
        self, inputs: list[dict[str, Any]], sample: Callable[[list[dict[str, Any]]], Sampled], logs: dict[str, Any]
    ) -> tuple[Sampled, dict[str, float]]:
        """One generation batch; every rank takes the same decisions.

        Groups are kept in the order in which they were sampled; what the last try gives beyond the batch is dropped.

        Args:
            inputs: this rank's rows of the first try.
            sample: generates and rewards this rank's rows.
            logs: TRL's completions table, which gets the rows of the batch.

        Returns:
            The batch, and `filter_groups/seen` and `filter_groups/kept` (groups), `filter_groups/tries` (generation
            batches) and `filter_groups/filled` (groups without spread that are in the batch all the same).

        Raises:
            ValueError: a batch has images, or tries differ in what they hold.
        """
        wanted = len(inputs) * self._accelerator.num_processes // self._size
        tries, tables, kept, others = [], [], [], []
        while len(kept) < wanted and len(tries) < self._most:
            if tries:
                inputs = self._further_inputs(wanted, len(inputs))
            for column in _columns(logs).values():
                column.clear()
            sampled = sample(inputs)
            _refuse_images(sampled.batch)
            differ = groups_that_differ(self._values(sampled.rewards), self._size)
            for group, differs in enumerate(differ):
                (kept if differs else others).append((len(tries), group))
            tries.append(sampled)
            tables.append({key: list(column) for key, column in _columns(logs).items()})
        metrics = {
            "filter_groups/seen": float(len(tries) * wanted),
            "filter_groups/kept": float(min(len(kept), wanted)),
            "filter_groups/tries": float(len(tries)),
            "filter_groups/filled": float(max(wanted - len(kept), 0)),
        }
        if len(kept) < wanted:
            self._warn_of_filling(len(kept), wanted)
        groups = [*kept, *others][:wanted]
        chosen = [(number, group * self._size + i) for number, group in groups for i in range(self._size)]
        if len(tries) == 1 and chosen == sorted(chosen):  # as it was sampled
            return tries[0], metrics
        _put(logs, tables, chosen)
        rewards = torch.stack([tries[t].rewards[i] for t, i in chosen])
        batch = redistributed([sampled.batch for sampled in tries], chosen, self._accelerator)
        return Sampled(batch, rewards), metrics

    def _further_inputs(self, prompts: int, rows: int) -> list[dict[str, Any]]:
        """This rank's rows of a generation batch of further prompts; each row its own, as TRL writes into them."""
        first = self._accelerator.process_index * rows
        taken = self.stream.take(prompts)
        return [copy.deepcopy(taken[i // self._size]) for i in range(first, first + rows)]

    def _warn_of_filling(self, kept: int, wanted: int) -> None:
        if self._warned:
            return
        self._warned = True
        logger.warning(
            "after %d generation batches (max_num_gen_batches) only %d of %d groups have responses that differ in "
            "filter_groups_metric=%r; the other %d are groups without such a difference, which teach little or "
            "nothing. Prompts that are neither too easy nor too hard, more num_generations or a finer reward help "
            "(said once; filter_groups/filled counts them)",
            self._most,
            kept,
            wanted,
            self._metric,
            wanted - kept,
        )


def require_text(dataset: Any, args: GRPOVerlConfig) -> None:
    """Fail on a dataset with images, whose tensors cannot be dealt out anew nor shown to a teacher.

    Raises:
        ValueError: names the column.
    """
    for column in {"image", "images"} & set(getattr(dataset, "column_names", None) or ()):
        if args.filter_groups:
            raise ValueError(
                f"filter_groups=True cannot carry images, and train_dataset has a column {column!r}; set "
                f"filter_groups=False, or train on text"
            )
        if args.teacher_model is not None:
            raise ValueError(
                f"teacher_model={args.teacher_model!r} is shown no images, and train_dataset has a column {column!r}; "
                f"drop teacher_model, or train on text"
            )


def groups_that_differ(values: Tensor, num_generations: int) -> list[bool]:
    """Of each group of `num_generations` consecutive values `(N,)`, whether two differ; NaN values do not count."""
    groups, infinity = values.view(-1, num_generations), values.new_tensor(torch.inf)
    highest = torch.where(groups.isnan(), -infinity, groups).amax(1)
    lowest = torch.where(groups.isnan(), infinity, groups).amin(1)
    return (highest > lowest).tolist()


def redistributed(tries: list[Batch], chosen: list[Row], accelerator: Accelerator) -> Batch:
    """A batch of the chosen rows, dealt out to ranks in their order; each rank gets as many as it has of a try.

    Args:
        tries: this rank's rows of each try.
        chosen: as many rows as one try has on all ranks; the same on every rank.
        accelerator: exchanges rows.
    """
    rows, rank = len(tries[0]["completion_ids"]), accelerator.process_index
    held = [[(t, i % rows) for t, i in chosen if i // rows == r] for r in range(accelerator.num_processes)]
    most = max(len(part) for part in held)  # the same number from each, as gathering needs
    positions = [t * rows + i for t, i in held[rank]]
    mine = take_rows(_joined(tries), positions + [0] * (most - len(positions)))
    gathered = {name: gathered_rows(name, mine[name], accelerator) for name in sorted(mine)}
    place = {(t, r * rows + i): r * most + k for r, part in enumerate(held) for k, (t, i) in enumerate(part)}
    batch = take_rows(gathered, [place[row] for row in chosen[rank * rows : (rank + 1) * rows]])
    if "num_items_in_batch" in batch:
        batch["num_items_in_batch"] = accelerator.gather(response_mask(batch).sum()).sum()
    return batch


def _joined(tries: list[Batch]) -> Batch:
    """All tries' rows, one try after the other; prompts padded on the left, the rest on the right."""
    names = set(tries[0])
    for batch in tries:
        if set(batch) != names:
            raise ValueError(
                f"the generation batches of filter_groups differ in {sorted(set(batch) ^ names)}; the rollout must "
                f"return the same fields each time"
            )

    def join(name: str) -> Any:
        values = [batch[name] for batch in tries]
        if isinstance(values[0], list):
            return [row for value in values for row in value]
        if not isinstance(values[0], Tensor) or values[0].ndim == 0:
            return values[-1]
        if values[0].ndim > 1:
            width = max(value.size(1) for value in values)
            left = name.startswith("prompt_")
            gaps = [width - value.size(1) for value in values]
            pads = [(gap, 0) if left else (0, gap) for gap in gaps]
            values = [torch.nn.functional.pad(value, pad) for value, pad in zip(values, pads, strict=True)]
        return torch.cat(values)

    return {name: join(name) for name in names}


def _refuse_images(batch: Batch) -> None:
    if "pixel_values" in batch or batch.get("num_images") is not None:
        raise ValueError("filter_groups=True cannot carry images; set filter_groups=False, or train on text")


def _columns(logs: dict[str, Any]) -> dict[tuple[str, ...], deque]:
    """The columns of TRL's completions table; rewards and users' extra columns are a level deeper."""
    columns = {}
    for name, column in logs.items():
        if isinstance(column, dict):
            columns |= {(name, inner): deeper for inner, deeper in column.items()}
        else:
            columns[(name,)] = column
    return columns


def _put(logs: dict[str, Any], tables: list[dict[tuple[str, ...], list]], chosen: list[Row]) -> None:
    """Fill the table with the chosen rows; an extra column that a try lacks is empty in its rows."""
    columns = _columns(logs)
    for key, column in columns.items():
        column.clear()
        parts = [table.get(key) or None for table in tables]
        if any(parts):
            column.extend(parts[t][i] if parts[t] and i < len(parts[t]) else None for t, i in chosen)
