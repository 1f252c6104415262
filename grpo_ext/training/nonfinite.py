"""Optimizer steps whose gradient is not finite: skipped, counted, and after several in a row the end of the run."""

from torch import Tensor, nn

from ..objective import Metric

_PREFIX = "nonfinite/"
# In the order in which a bad number travels through a step.
QUANTITIES = ("advantage", "log-prob", "log-ratio", "reference log-ratio (KL)", "entropy")


def nonfinite_counts(mask: Tensor, tensors: dict[str, Tensor | None]) -> dict[str, Metric]:
    """How many values under the mask are NaN or infinite, by quantity; no wait for the device.

    Args:
        mask: `(B, T)`, 1 where the value counts.
        tensors: `(B, T)` or `(B, 1)` by name in `QUANTITIES`; `None` is left out.
    """
    return {
        _PREFIX + name: Metric(((~value.detach().isfinite()) & mask.bool()).sum(), 1)
        for name, value in tensors.items()
        if value is not None
    }


class NonFiniteSteps:
    """Counts skipped optimizer steps and remembers where the present row of them began.

    Attributes:
        total: skipped steps of the run.
    """

    def __init__(self, limit: int):
        """`limit`: skipped steps in a row that end the run."""
        self._limit = limit
        self._skipped = False
        self.load_state({"total": 0, "in_a_row": 0, "first": None})

    def state(self) -> dict[str, int | str | None]:
        """What a checkpoint keeps."""
        return {"total": self.total, "in_a_row": self._in_a_row, "first": self._first}

    def load_state(self, state: dict[str, int | str | None]) -> None:
        """The inverse of `state`."""
        self.total, self._in_a_row, self._first = state["total"], state["in_a_row"], state["first"]
        self._skipped = False

    def drop_gradient(self, model: nn.Module) -> None:
        """Skip the coming `optimizer.step()`: parameters without a gradient are left alone, and so is their state."""
        for parameter in model.parameters():
            parameter.grad = None
        self._skipped = True

    def end_step(self, step: int, metrics: dict[str, float]) -> None:
        """Take the counts of the step out of `metrics`, and judge it.

        Raises:
            FloatingPointError: `limit` steps in a row were skipped; names the first bad quantity and its step.
        """
        bad = {name: metrics.pop(name) for name in list(metrics) if name.startswith(_PREFIX)}
        if not self._skipped:
            self._in_a_row, self._first = 0, None
            return
        self._skipped = False
        self.total += 1
        self._in_a_row += 1
        if self._first is None:
            culprits = [name.removeprefix(_PREFIX) for name, count in bad.items() if count > 0]
            named = next((name for name in QUANTITIES if name in culprits), "gradient (all its inputs were finite)")
            self._first = f"first non-finite quantity: {named}, at step {step}"
        if self._in_a_row >= self._limit:
            raise FloatingPointError(
                f"{self._in_a_row} optimizer steps in a row had a gradient that is NaN or infinite and were skipped "
                f"({self._first}). The last checkpoint is good; lower learning_rate or max_grad_norm, or raise "
                f"max_nonfinite_steps={self._limit} to go on regardless"
            )
