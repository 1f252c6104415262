"""From micro-batch sums to the numbers of an optimizer step, in the logs and in users' callbacks."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import TrainerCallback

from ..objective import Metric
from ..objective.rollout_correction import finish_rollout_metrics
from .forward import processed_tokens
from .nonfinite import NonFiniteSteps
from .windows import ForwardPlan

Number = Tensor | float
TOKENS = "perf/tokens"  # of the step; becomes perf/tokens_per_second


class MetricSums:
    """Metrics of one optimizer step (or one evaluation), summed on the device until they are read.

    `add` neither waits for the device nor talks to other ranks; `reduce` does each once.
    """

    def __init__(self):
        self._sums: dict[tuple[str, bool], tuple[Number, Number]] = {}
        self._extremes: dict[tuple[str, str], Tensor] = {}

    def add(self, metrics: dict[str, Metric]) -> None:
        """Add one micro-batch's metrics."""
        for name, metric in metrics.items():
            if metric.extreme is not None:
                self._add_extreme(name, metric)
                continue
            key = (name, metric.share)
            total, count = self._sums.get(key, (0.0, 0.0))
            if metric.share:
                self._sums[key] = (total + _precise(metric.value), count)
            else:
                self._sums[key] = (total + _precise(metric.total), count + _precise(metric.count))

    def _add_extreme(self, name: str, metric: Metric) -> None:
        key, value = (name, metric.extreme), _precise(metric.total)
        if key in self._extremes:
            pick = torch.maximum if metric.extreme == "max" else torch.minimum
            value = pick(self._extremes[key], value)
        self._extremes[key] = value

    def clear(self) -> None:
        """Forget what was added."""
        self._sums, self._extremes = {}, {}

    def reduce(self, accelerator: Accelerator) -> dict[str, float]:
        """The step's values over all micro-batches and ranks, and an empty slate; call it on every rank.

        A mean is `sum of totals / sum of counts`; a share adds up over micro-batches and is averaged over ranks; an
        extreme that no rank had is left out.
        """
        values = self._reduced_sums(accelerator) | self._reduced_extremes(accelerator)
        self.clear()
        return values

    def _reduced_extremes(self, accelerator: Accelerator) -> dict[str, float]:
        if not self._extremes:
            return {}
        keys = sorted(self._extremes)
        signs = [1.0 if extreme == "max" else -1.0 for _, extreme in keys]
        mine = torch.stack([_on(accelerator.device, s * self._extremes[k]) for s, k in zip(signs, keys, strict=True)])
        largest = accelerator.gather(mine[None]).amax(0).tolist()
        return {
            name: sign * value
            for (name, _), sign, value in zip(keys, signs, largest, strict=True)
            if math.isfinite(value)
        }

    def _reduced_sums(self, accelerator: Accelerator) -> dict[str, float]:
        if not self._sums:
            return {}
        keys = sorted(self._sums)  # the same order on every rank
        pairs = torch.stack([_on(accelerator.device, x) for key in keys for x in self._sums[key]]).view(-1, 2)
        totals = accelerator.reduce(pairs, reduction="sum").tolist()
        return {
            name: total / accelerator.num_processes if share else total / max(count, 1)
            for (name, share), (total, count) in zip(keys, totals, strict=True)
        }


def _sum_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64


def _precise(x: Number) -> Number:
    return x.to(_sum_dtype(x.device)) if isinstance(x, Tensor) else float(x)


def _on(device: torch.device, x: Number) -> Tensor:
    return x if isinstance(x, Tensor) else torch.full((), x, dtype=_sum_dtype(device), device=device)


def forward_metrics(plan: ForwardPlan | None, attention_mask: Tensor, *, packed: bool) -> dict[str, Metric]:
    """What a micro-batch's forwards ran through the model: its tokens, padding and rows without a backward.

    Args:
        plan: of its forwards; `None`: TRL's padded one.
        attention_mask: `(B, P + C)`, 1 on each row's own tokens.
        packed: rows end to end.
    """
    if plan is None:
        rows, spared = len(attention_mask), 0
        tokens = real = attention_mask.sum()
        processed = attention_mask.numel()
    else:
        rows, spared = len(plan.lengths), plan.spared
        tokens = sum(n.total for n in plan.lengths)
        groups = [*plan.train, *plan.observe]
        real = sum(plan.lengths[i].total for group in groups for i in group)
        processed = processed_tokens(plan.lengths, groups, packed=packed)
    return {
        TOKENS: Metric(tokens, 0),
        "perf/padding_fraction": Metric(processed - real, processed),
        "perf/skipped_row_fraction": Metric(spared, rows),
    }


class StepMetricsCallback(TrainerCallback):
    """Base class for callbacks that read each optimizer step's metrics: override `on_step_metrics`.

    Any `TrainerCallback` with a method of that name is called too.
    """

    def on_step_metrics(self, args, state, control, metrics: dict[str, float], **kwargs) -> None:
        """Called on every rank after each optimizer step, with the metrics over its micro-batches and ranks.

        Args:
            metrics: verl's names (`actor/pg_loss`, `actor/pg_clipfrac`, ...), reduced.
            kwargs: `trainer`, the trainer.
        """


class UpdateClock:
    """Seconds of an optimizer step without those in which responses were generated and scored."""

    def __init__(self):
        self._started = time.perf_counter()
        self._excluded = 0.0

    def start(self) -> None:
        """Begin a step."""
        self._started, self._excluded = time.perf_counter(), 0.0

    @contextmanager
    def excluding(self) -> Iterator[None]:
        """What runs inside does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._excluded += time.perf_counter() - start

    def seconds(self) -> float:
        """Since `start`, on the host; after a step's metrics were read the device has caught up."""
        return time.perf_counter() - self._started - self._excluded


class ActorMetricsCallback(TrainerCallback):
    """Puts the objective's metrics of each optimizer step into the logs, beside TRL's own, through `report_to`.

    They are averaged over the steps between two logs, as TRL does with its own metrics.
    """

    def __init__(self, trainer, nonfinite: NonFiniteSteps):
        self._trainer = trainer
        self._nonfinite = nonfinite
        self.sums = defaultdict(MetricSums)  # by mode: "train" and "eval" never meet
        self.clock = UpdateClock()

    def on_step_begin(self, args, state, control, **kwargs):
        self.clock.start()

    def on_step_end(self, args, state, control, **kwargs):
        metrics = finish_rollout_metrics(self.sums["train"].reduce(self._trainer.accelerator))
        if TOKENS in metrics:
            metrics["perf/tokens_per_second"] = metrics.pop(TOKENS) / max(self.clock.seconds(), 1e-9)
        self._nonfinite.end_step(state.global_step, metrics)
        self.record("train", metrics)
        for callback in self._trainer.callback_handler.callbacks:
            hook = getattr(callback, "on_step_metrics", None)
            if hook is not None:
                hook(args, state, control, metrics=metrics, trainer=self._trainer)

    def finish_evaluation(self) -> None:
        """Put the metrics of the evaluation that ends into its log."""
        # Its rollout is not corrected, so that nothing is known of the sampler
        of_training = ("perf/", "rollout_corr/")
        metrics = self.sums["eval"].reduce(self._trainer.accelerator)
        self.record("eval", {name: value for name, value in metrics.items() if not name.startswith(of_training)})

    def record(self, mode: str, metrics: dict[str, float]) -> None:
        """Hand reduced metrics to TRL's log buffer, which averages them over the logged steps."""
        for name, value in metrics.items():
            self._trainer._metrics[mode][name].append(value)
