"""Which rows go through the model together: plans on the host, in tokens, before anything runs.

Padding costs what its tokens cost; one packed row costs attention across its rows where attention is dense; a forward
of its own costs a fixed overhead. The plans here weigh these three.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from transformers import PretrainedConfig


class RowLength(NamedTuple):
    """Tokens of one row."""

    prompt: int
    completion: int

    @property
    def total(self) -> int:
        """Prompt and completion together; 0 if there is no completion, and so nothing to score."""
        return self.prompt + self.completion if self.completion else 0


@dataclass(frozen=True)
class CostModel:
    """What a row of `n` tokens costs, in units of one token without attention: `n + n**2 / crossover`.

    Attributes:
        crossover: tokens at which attention costs as much as everything else.
        overhead: what one forward costs beside its tokens, in the same unit.
    """

    crossover: float
    overhead: float

    @classmethod
    def of(cls, config: PretrainedConfig, device_type: str) -> "CostModel":
        """From a model's shape: per token and layer about `12 h**2` multiplications, per pair of tokens `2 h`."""
        hidden = getattr(config.get_text_config(), "hidden_size", None) or 1024
        # A forward of few tokens leaves an accelerator idle; a CPU is busy with a hundred.
        return cls(crossover=6.0 * hidden, overhead=32.0 if device_type == "cpu" else 1024.0)

    def row(self, tokens: int) -> float:
        """Cost of one row."""
        return tokens + tokens * tokens / self.crossover


def balanced_parts(lengths: Sequence[RowLength], parts: int, row_costs: Sequence[float]) -> list[list[int]]:
    """Split rows into `parts` of about equal cost, each of rows of similar length.

    Args:
        lengths: of the rows.
        parts: how many; each gets at least one row.
        row_costs: what each row costs.

    Returns:
        Indices of each part's rows, longest part first.

    Raises:
        ValueError: fewer rows than parts.
    """
    if len(lengths) < parts:
        raise ValueError(f"{len(lengths)} rows cannot be split into {parts} parts")
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i].total, i))
    costs = [max(row_costs[i], 1e-9) for i in order]

    def cut(ceiling: float) -> list[list[int]] | None:
        """Consecutive parts, none dearer than the ceiling, leaving a row for each part still to come."""
        result, start = [], 0
        for part in range(parts):
            room = len(order) - (parts - part - 1)
            end, spent = start + 1, costs[start]
            while end < room and spent + costs[end] <= ceiling:
                spent += costs[end]
                end += 1
            result.append(order[start:end])
            start = end
        return result if start == len(order) else None

    low, high = max(costs), sum(costs)
    for _ in range(40):  # the ceiling to 1e-12 of the total
        middle = (low + high) / 2
        low, high = (low, middle) if cut(middle) else (middle, high)
    return cut(high * (1 + 1e-9)) or cut(sum(costs))


def balanced_ranks(costs: Sequence[float], ranks: int, at_least: int) -> list[list[int]]:
    """Deal rows out to ranks so that the dearest rank costs as little as may be: the dearest row to the cheapest rank.

    Args:
        costs: of the rows, all ranks' together.
        ranks: how many.
        at_least: rows that every rank needs.

    Returns:
        Indices of each rank's rows, ascending. The same on every rank that calls it with the same costs.

    Raises:
        ValueError: too few rows.
    """
    if len(costs) < ranks * at_least:
        raise ValueError(f"{len(costs)} rows cannot give each of {ranks} ranks {at_least}")
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    spent = [0.0] * ranks
    missing = ranks * at_least  # rows still owed
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for position, row in enumerate(order):
        must_pay_owed = len(order) - position <= missing
        open_ranks = [r for r in range(ranks) if not must_pay_owed or len(dealt[r]) < at_least]
        rank = min(open_ranks, key=lambda r: (spent[r], r))
        missing -= len(dealt[rank]) < at_least
        dealt[rank].append(row)
        spent[rank] += costs[row]
    return [sorted(rows) for rows in dealt]


def padded_groups(lengths: Sequence[RowLength], cost: CostModel, max_tokens: int | None = None) -> list[list[int]]:
    """Group rows for forwards that pad each row to the longest of its group, at the least total cost.

    Rows without a completion are left out.

    Args:
        lengths: of the rows.
        cost: what a row and a forward cost.
        max_tokens: of a group, padding included; a longer single row still is a group. `None`: no bound.
    """
    order = sorted((i for i, n in enumerate(lengths) if n.total), key=lambda i: (-lengths[i].total, i))
    sizes = [lengths[i].total for i in order]
    # best[j]: least cost of the first j rows (longest first), and where its last group starts
    best: list[tuple[float, int]] = [(0.0, 0)]
    for j in range(1, len(order) + 1):
        options = []
        for i in range(j - 1, -1, -1):
            rows, width = j - i, sizes[i]
            if rows > 1 and max_tokens is not None and rows * width > max_tokens:
                break
            options.append((best[i][0] + rows * cost.row(width) + cost.overhead, i))
        best.append(min(options))
    groups, end = [], len(order)
    while end:
        start = best[end][1]
        groups.append(order[start:end])
        end = start
    return groups[::-1]


def packed_groups(lengths: Sequence[RowLength], max_tokens: int | None = None) -> list[list[int]]:
    """Group rows for forwards that lay them end to end: one group, or as few as the budget allows.

    Rows without a completion are left out.

    Args:
        lengths: of the rows.
        max_tokens: of a group; a longer single row still is a group. `None`: no bound.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for i in sorted((i for i, n in enumerate(lengths) if n.total), key=lambda i: (-lengths[i].total, i)):
        tokens = lengths[i].total
        fitting = [g for g, free in enumerate(room) if max_tokens is None or tokens <= free]
        if fitting:
            groups[fitting[0]].append(i)
            room[fitting[0]] -= tokens
        else:
            groups.append([i])
            room.append((max_tokens or 0) - tokens)
    return groups


def exactly(groups: list[list[int]], count: int) -> list[list[int]]:
    """The same rows in exactly `count` groups: the largest are halved; where rows run out, empty groups follow.

    Args:
        groups: at most `count` of them.
        count: agreed among ranks, which must run equally many forwards.
    """
    groups = [list(group) for group in groups]
    while len(groups) < count:
        largest = max(groups, key=len, default=[])
        if len(largest) < 2:
            groups.append([])
            continue
        half = len(largest) // 2
        groups.append(largest[half:])
        del largest[half:]
    return groups
