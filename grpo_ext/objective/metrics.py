"""One number of a dashboard, kept as a sum and a count until the optimizer step is complete."""

from dataclasses import dataclass

from torch import Tensor

from .masking import masked_sum


@dataclass(frozen=True)
class Metric:
    """`total / max(count, 1)`, kept apart so that micro-batches and ranks combine exactly (README, departure 4).

    Three kinds. A *mean* (`share=False`) carries this micro-batch's own sum and count: the optimizer step's value is
    `sum of totals / sum of counts`. A *share* (`share=True`) carries a count that already spans the optimizer step
    (and a total times `dp_size`): the shares add up over micro-batches and are averaged over ranks, as the loss is. An
    *extreme* is the largest or smallest total; an infinite one, of a micro-batch that had none, is left out.

    Attributes:
        total: scalar tensor, or a number for a constant; in the metric's own unit.
        count: scalar tensor or number, what the sum is divided by (tokens, sequences or 1); of an extreme, 1.
        share: whether it is a share.
        extreme: `"max"`, `"min"`, or `None`.
    """

    total: Tensor | float
    count: Tensor | float
    share: bool = False
    extreme: str | None = None

    @property
    def value(self) -> Tensor | float:
        """The metric of this micro-batch alone, on the device of `total` (no synchronisation)."""
        count = self.count
        if not self.share:
            count = count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        return self.total / count

    def __float__(self) -> float:
        """The value on the host; waits for the device."""
        return float(self.value)


def mean_metric(x: Tensor, mask: Tensor) -> Metric:
    """The mean over valid tokens of `x` `(B, T)`, detached, as a sum and a count of tokens."""
    x = x.detach()
    return Metric(masked_sum(x if x.is_floating_point() else x.float(), mask), mask.bool().sum())
