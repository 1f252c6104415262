"""Rollout correction: weights and rejection for responses that another policy, or another implementation, sampled."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .masking import keep, masked_sum, require_token_shape
from .metrics import Metric, mean_metric

_LOG_RATIO_BOUND = 20.0  # nats; exp(20) is finite in float32
_SMALLEST_MEAN = 1e-8  # of weights; a smaller one is not divided by
_DEFAULT_IS_THRESHOLD = 2.0
_PREFIX = "rollout_corr/"

ROLLOUT_IS_LEVELS: tuple[str, ...] = ("token", "sequence")

# What a token's log ratio x = log(pi_train / pi_rollout) is turned into, nats.
_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda x: x,
    "k2": lambda x: 0.5 * x.square(),
    "k3": lambda x: x.exp() - 1 - x,
}
# From a value per token to what is compared with the bounds: (B, T), or (B, 1) for one value per sequence.
_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda x, mask: x,
    "seq_sum": lambda x, mask: masked_sum(x, mask, dim=-1).unsqueeze(-1),
    "seq_mean": lambda x, mask: _row_mean(x, mask).unsqueeze(-1),
    "seq_max": lambda x, mask: keep(x, mask).amax(-1, keepdim=True),  # of k2 and k3, which are never below 0
}
ROLLOUT_RS_OPTIONS: tuple[str, ...] = tuple(
    f"{level}_{estimator}" for level in _LEVELS for estimator in _ESTIMATORS if (level, estimator) != ("seq_max", "k1")
)


class Bounds(NamedTuple):
    """A closed interval."""

    lower: float | None  # None: unbounded
    upper: float


@dataclass(frozen=True)
class RolloutCorrection:
    """Weights of the policy loss and rejection of tokens, for responses sampled by pi_rollout and scored by pi_train.

    Every ratio is `pi_train / pi_rollout`: above 1 where the rollout's policy gave a token less than the trained one.

    Attributes:
        rollout_is: level of the weights: `token`, one ratio per token; `sequence`, the product over a response; `None`:
            no weights.
        rollout_is_threshold: a number (or such a string) cuts larger weights to it (TIS); `"lower_upper"` sets those
            outside to 0 (IcePop). No weight exceeds exp(20).
        rollout_is_batch_normalize: divide the weights by their mean over the batch.
        rollout_rs: comma-separated names of `ROLLOUT_RS_OPTIONS`, all of which a token has to pass; repeated names
            count once; `None`: nothing is rejected. `token_*` rejects tokens, `seq_*` whole responses by the sum, mean
            or maximum over their valid tokens.
        rollout_rs_threshold: one for all options, or comma-separated as many as there are options. k1: bounds of the
            ratio, `"lower_upper"`, or `u` for `1/u` to `u`; for `seq_mean_k1` of the geometric mean ratio, for
            `seq_sum_k1` of the product. The bounds are of `pi_train / pi_rollout`; verl compares them with its
            reciprocal, so that verl's `a_b` is `1/b_1/a` here (README, departure 18). k2, k3: one upper bound in nats.

    Raises:
        ValueError: names the setting, its value and the remedy.

    Sources: verl 0.9.1, `trainer.config.algorithm.RolloutCorrectionConfig` (whose `rollout_is` defaults to `sequence`);
    Yao et al. 2025 (TIS), https://fengyao.notion.site/off-policy-rl; Liu et al. 2025,
    https://richardli.xyz/rl-collapse.
    """

    rollout_is: str | None = None
    rollout_is_threshold: float | str = _DEFAULT_IS_THRESHOLD
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None

    def __post_init__(self):
        if self.rollout_is is not None and self.rollout_is not in ROLLOUT_IS_LEVELS:
            raise ValueError(
                f"rollout_is={self.rollout_is!r} is unknown; choose one of {', '.join(ROLLOUT_IS_LEVELS)}, or None"
            )
        if not isinstance(self.rollout_is_batch_normalize, bool):
            raise ValueError(f"rollout_is_batch_normalize={self.rollout_is_batch_normalize!r} must be True or False")
        _ = self.weight_bounds, self.rejection_bounds  # reading them checks them
        if self.rollout_is is None:
            for name, idle in (
                ("rollout_is_threshold", _DEFAULT_IS_THRESHOLD),
                ("rollout_is_batch_normalize", False),
            ):
                if getattr(self, name) not in (idle, str(idle)):  # a command line gives text
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} has no effect with rollout_is=None; set rollout_is to one of "
                        f"{', '.join(ROLLOUT_IS_LEVELS)}, or drop {name}"
                    )

    @property
    def active(self) -> bool:
        """Whether there is anything to compute but metrics."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def weight_bounds(self) -> Bounds:
        """Of the weights, ratios: `lower` is `None` for TIS."""
        return _parse_bounds("rollout_is_threshold", self.rollout_is_threshold)

    @property
    def rejection_bounds(self) -> dict[str, Bounds]:
        """Of each option's statistic, nats: for k1 the logarithms of the ratio's bounds."""
        if self.rollout_rs is None:
            if self.rollout_rs_threshold is not None:
                raise ValueError(
                    f"rollout_rs_threshold={self.rollout_rs_threshold!r} has no effect with rollout_rs=None; set "
                    f"rollout_rs, or drop rollout_rs_threshold"
                )
            return {}
        options = _parse_options(self.rollout_rs)
        thresholds = self.rollout_rs_threshold
        if thresholds is None:
            raise ValueError(
                f"rollout_rs={self.rollout_rs!r} needs rollout_rs_threshold, such as '0.5_2.0' for a k1 option or 0.1 "
                f"for a k2 or k3 option"
            )
        thresholds = thresholds.split(",") if isinstance(thresholds, str) else [thresholds]
        if len(thresholds) not in (1, len(options)):
            raise ValueError(
                f"rollout_rs_threshold={self.rollout_rs_threshold!r} has {len(thresholds)} thresholds for the "
                f"{len(options)} options {', '.join(options)}; give one for all or one for each"
            )
        if len(thresholds) == 1:
            thresholds = thresholds * len(options)
        return {
            option: _statistic_bounds(option, threshold) for option, threshold in zip(options, thresholds, strict=True)
        }


def rollout_correction_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    config: RolloutCorrection,
    *,
    mean: Tensor | float | None = None,
) -> Tensor | None:
    """Importance weights of the policy loss, `w = bounded(exp(clamp(x, -20, 20)))`, with `x` the log ratio.

    `x_t = old_log_prob_t - rollout_log_prob_t`; at `sequence` level every token has the sum of its row's valid `x_t`.
    `bounded(w)` is `min(w, upper)` (TIS), or `w` inside `[lower, upper]` and 0 outside (IcePop).

    A token whose rollout log-prob is NaN (the sampler gave none) counts as ratio 1.

    Args:
        old_log_prob: `(B, T)`, nats, of the policy that the step started from, by the trainer's own forward.
        rollout_log_prob: `(B, T)`, nats, as the sampler reported it.
        response_mask: `(B, T)`, 1 where a token is trained on, before any rejection. Values elsewhere are never read.
        config: the settings.
        mean: with `rollout_is_batch_normalize`, what the weights are divided by: `weight_sums` over all parts of the
            batch (a mean of 1e-8 or less is not divided by). `1` leaves them as `weight_sums` takes them. `None`: this
            tensor is the whole batch.

    Returns:
        `(B, T)`, detached, 0 outside the mask, float32, or float64 if the log-probs are; `None` without `rollout_is`.

    Raises:
        ValueError: shapes differ; `mean` without `rollout_is_batch_normalize`.

    Source: verl 0.9.1, `rollout_corr_helper.compute_rollout_correction_weights`.
    """
    if mean is not None and not config.rollout_is_batch_normalize:
        raise ValueError("mean is given, but rollout_is_batch_normalize=False divides by none; set it, or drop mean")
    old, rollout = _log_probs(old_log_prob, rollout_log_prob, response_mask)
    if config.rollout_is is None:
        return None
    weights = _bounded(_raw_weights(old - rollout, response_mask, config.rollout_is), config.weight_bounds)
    if not config.rollout_is_batch_normalize:
        return weights
    if mean is None:
        total, count = weight_sums(weights, response_mask, config)
        mean = total / count.clamp(min=1)
    mean = torch.as_tensor(mean, dtype=weights.dtype, device=weights.device)
    return weights / torch.where(mean > _SMALLEST_MEAN, mean, torch.ones_like(mean))


def weight_sums(weights: Tensor, response_mask: Tensor, config: RolloutCorrection) -> tuple[Tensor, Tensor]:
    """The sum of the weights and what it is divided by, to be added up over micro-batches and ranks.

    `token` level: over valid tokens. `sequence` level: over the rows that have one, each counted once.

    Args:
        weights: `(B, T)`, from `rollout_correction_weights(..., mean=1)`: not yet normalised.
        response_mask: `(B, T)`, the same as there.
        config: the settings.

    Returns:
        `(total, count)`, scalars on the device of `weights`; `total / count` is the `mean` that normalises.

    Source: verl 0.9.1, `rollout_corr_helper.compute_rollout_correction_weights`.
    """
    if config.rollout_is == "sequence":
        metric = mean_metric(_row_mean(weights, response_mask), response_mask.bool().any(-1))
    else:
        metric = mean_metric(weights, response_mask)
    return metric.total, metric.count


def rejection_mask(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: RolloutCorrection
) -> Tensor:
    """The response mask without the tokens and responses that strayed too far from the policy that sampled them.

    With `x = clamp(old_log_prob - rollout_log_prob, -20, 20)` per token, kept if `lower <= statistic <= upper`:

    | estimator | value per token | kept, for `token_*` |
    | --- | --- | --- |
    | `k1` | `x` | `lower <= pi_train / pi_rollout <= upper` |
    | `k2` | `x**2 / 2` | `<= upper`, nats |
    | `k3` | `exp(x) - 1 - x` | `<= upper`, nats |

    `seq_sum_*`, `seq_mean_*` and `seq_max_*` (k2, k3) compare the sum, mean or maximum over a row's valid tokens, and
    keep or reject the row. k3 and -k1 estimate KL(rollout || train).

    A token whose rollout log-prob is NaN (the sampler gave none) counts as ratio 1, which sensible bounds keep.

    Args:
        old_log_prob: `(B, T)`, nats, of the policy that the step started from, by the trainer's own forward.
        rollout_log_prob: `(B, T)`, nats, as the sampler reported it.
        response_mask: `(B, T)`, 1 where a token is trained on. Values elsewhere are never read.
        config: the settings.

    Returns:
        `(B, T)`, in the dtype of `response_mask`, 0 where it was 0 or something was rejected.

    Raises:
        ValueError: shapes differ.

    Source: verl 0.9.1, `rollout_corr_helper.compute_rollout_rejection_mask`.
    """
    old, rollout = _log_probs(old_log_prob, rollout_log_prob, response_mask)
    mask = response_mask
    for option, bounds in config.rejection_bounds.items():
        inside = _inside(_statistic(old - rollout, response_mask, option), bounds)
        mask = mask.masked_fill(~inside, 0)
    return mask


def rollout_correction_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor, response_mask: Tensor, config: RolloutCorrection
) -> dict[str, Metric]:
    """How far the rollout's policy is from the trained one, and what the correction did, by verl's names.

    All begin with `rollout_corr/`. Always: `kl`, `k3_kl` (KL(rollout || train), nats a token), `training_ppl`,
    `training_log_ppl`, `rollout_ppl`, `rollout_log_ppl`, `log_ppl_diff`, `log_ppl_abs_diff`, `log_ppl_diff_max`,
    `log_ppl_diff_min`, `ppl_ratio` (train / rollout, per row), `chi2_token`, `chi2_seq`; and `nan_fraction`, the share
    of tokens without a rollout log-prob, which count as ratio 1 in all others.

    With `rollout_is`, of the weights before normalisation: `rollout_is_mean`, `_max`, `_min` (at `sequence` level of
    the ratios before the bounds), `_ratio_fraction_high`, `_ratio_fraction_low` (ratios outside the bounds; TIS: below
    1 / upper), `_oob_ratio` (IcePop), `_seq_mean`, `_seq_max`, `_seq_min`, `_seq_max_deviation` (from 1),
    `_seq_fraction_high`, `_seq_fraction_low`, `_batch_norm_factor` (the mean that normalises).

    With `rollout_rs`: `rollout_rs_masked_fraction`, `rollout_rs_seq_masked_fraction` (rows that lost a token), and for
    each option `rollout_rs_{option}_` with `masked_fraction`, `seq_masked_fraction`, `mean`, `max`, `min`,
    `fraction_high`, `fraction_low` (k1), and `seq_` with `mean`, `max`, `min`, `max_deviation`, `fraction_high`,
    `fraction_low` (k1), of the statistic that `rejection_mask` compares. k1 is the log ratio as everywhere here, the
    negative of verl's: high is above the upper threshold.

    Standard deviations and the effective sample size are no means. Their sums travel as `{name}_std/mean`, `/square`
    and `/rows`, from which `finish_rollout_metrics` makes `rollout_is_std`, `rollout_is_eff_sample_size`,
    `rollout_is_seq_std`, `rollout_rs_{option}_std` and `rollout_rs_{option}_seq_std` once all has been added up.

    Means over rows leave out those without a valid token; verl counts them, with perplexity 1, weight 0 or ratio 1
    (README, departure 18).

    Args:
        old_log_prob: `(B, T)`, nats, of the policy that the step started from, by the trainer's own forward.
        rollout_log_prob: `(B, T)`, nats, as the sampler reported it.
        response_mask: `(B, T)`, 1 where a token is trained on, before any rejection. Values elsewhere are never read.
        config: the settings.

    Returns:
        Metrics, detached; means over tokens or rows as sums and counts, maxima and minima as `extreme` (infinite where
        nothing is valid).

    Raises:
        ValueError: shapes differ.

    Source: verl 0.9.1, `rollout_corr_helper.compute_offpolicy_metrics`, `compute_is_metrics`, `compute_rs_metrics`.
    """
    old, rollout = _log_probs(old_log_prob, rollout_log_prob, response_mask)
    metrics = _divergence_metrics(old, rollout, response_mask)
    metrics["nan_fraction"] = mean_metric(rollout_log_prob.isnan(), response_mask)
    if config.rollout_is is not None:
        metrics |= _weight_metrics(old - rollout, response_mask, config)
    if config.rollout_rs is not None:
        metrics |= _rejection_metrics(old - rollout, response_mask, config)
    return {_PREFIX + name: metric for name, metric in metrics.items()}


def finish_rollout_metrics(values: Mapping[str, float]) -> dict[str, float]:
    """Reduced metrics with the sums of `rollout_correction_metrics` turned into what is not a mean; others pass.

    Over the tokens: `std = sqrt(mean(x**2) - mean(x)**2)`. Over the rows (`_seq_std`), times `sqrt(n / (n - 1))`. The
    effective sample size, as a share of the tokens, is `(mean(w) + 1e-8)**2 / mean(w**2)`; 0 if all weights are.

    Args:
        values: names to values over all micro-batches and ranks.

    Source: verl 0.9.1, `rollout_corr_helper.compute_is_metrics`, `compute_rs_metrics`.
    """
    finished = dict(values)
    for name in values:
        std = name.removesuffix("/square")
        if std == name or not std.startswith(_PREFIX):
            continue
        mean, square, rows = finished.pop(f"{std}/mean"), finished.pop(name), finished.pop(f"{std}/rows", None)
        variance = max(square - mean * mean, 0.0)
        if rows is not None:
            variance *= rows / max(rows - 1, 1)
        finished[std] = math.sqrt(variance)
        if std == f"{_PREFIX}rollout_is_std":
            size = (mean + 1e-8) ** 2 / square if square > 0 else 0.0
            finished[f"{_PREFIX}rollout_is_eff_sample_size"] = size
    return finished


# Settings


def _parse_bounds(name: str, threshold: float | str) -> Bounds:
    parts = threshold.split("_") if isinstance(threshold, str) else [threshold]
    try:
        if isinstance(threshold, bool) or len(parts) > 2:
            raise ValueError
        numbers = list(map(float, parts))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(
            f"{name}={threshold!r} must be a number, such as 2.0, or 'lower_upper', such as '0.5_2.0'"
        ) from None
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"{name}={threshold!r} must consist of finite numbers > 0, such as 2.0 or '0.5_2.0'")
    if numbers[0] > numbers[-1]:
        raise ValueError(f"{name}={threshold!r} has its bounds the wrong way round; write 'lower_upper'")
    return Bounds(numbers[0] if len(numbers) == 2 else None, numbers[-1])


def _parse_options(names: str) -> list[str]:
    if not isinstance(names, str):
        raise ValueError(f"rollout_rs={names!r} must be comma-separated names, such as 'token_k1,seq_mean_k3', or None")
    options = list(dict.fromkeys(option.strip() for option in names.split(",")))
    for option in options:
        if option not in ROLLOUT_RS_OPTIONS:
            raise ValueError(
                f"rollout_rs={names!r} has the unknown option {option!r}; choose from {', '.join(ROLLOUT_RS_OPTIONS)}"
            )
    return options


def _statistic_bounds(option: str, threshold: float | str) -> Bounds:
    lower, upper = _parse_bounds("rollout_rs_threshold", threshold)
    if not option.endswith("_k1"):
        if lower is not None:
            raise ValueError(
                f"rollout_rs_threshold={threshold!r} has two bounds, but {option} takes one upper bound in nats, such "
                f"as {upper}"
            )
        return Bounds(None, upper)
    if lower is None:
        lower = 1 / upper
        if lower > upper:
            raise ValueError(
                f"rollout_rs_threshold={threshold!r} as the upper bound of the ratio of {option} is below its lower "
                f"bound 1 / {upper}; give a number >= 1, or 'lower_upper'"
            )
    return Bounds(math.log(lower), math.log(upper))


# Ratios


def _log_probs(old_log_prob: Tensor, rollout_log_prob: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Both detached and 0 outside the mask; an unknown rollout log-prob is the old one, so that the ratio is 1."""
    require_token_shape(old_log_prob.shape, rollout_log_prob=rollout_log_prob, response_mask=mask)
    old, rollout = keep(old_log_prob.detach(), mask), keep(rollout_log_prob.detach(), mask)
    return old, torch.where(rollout.isnan(), old, rollout)


def _row_mean(x: Tensor, mask: Tensor) -> Tensor:
    return masked_sum(x, mask, dim=-1) / mask.bool().sum(-1).clamp(min=1)


def _raw_weights(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    if level == "sequence":
        log_ratio = masked_sum(log_ratio, mask, dim=-1).unsqueeze(-1).expand_as(log_ratio)
    return keep(log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND).exp(), mask)


def _bounded(weights: Tensor, bounds: Bounds) -> Tensor:
    if bounds.lower is None:
        return weights.clamp(max=bounds.upper)
    return torch.where(_inside(weights, bounds), weights, weights.new_zeros(()))


def _statistic(log_ratio: Tensor, mask: Tensor, option: str) -> Tensor:
    level, estimator = option.rsplit("_", 1)
    return _LEVELS[level](_ESTIMATORS[estimator](log_ratio.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)), mask)


def _inside(x: Tensor, bounds: Bounds) -> Tensor:
    inside = x <= bounds.upper
    return inside if bounds.lower is None else inside & (x >= bounds.lower)


# Metrics: each of `x` where `where` is true, over tokens (B, T) or rows (B,)


def _extremes(name: str, x: Tensor, where: Tensor) -> dict[str, Metric]:
    return {f"{name}_max": _extreme(x, where, "max"), f"{name}_min": _extreme(x, where, "min")}


def _extreme(x: Tensor, where: Tensor, kind: str) -> Metric:
    nothing = -math.inf if kind == "max" else math.inf
    x = torch.where(where.bool(), x, x.new_full((), nothing))
    return Metric(x.amax() if kind == "max" else x.amin(), 1, extreme=kind)


def _outside(name: str, x: Tensor, where: Tensor, bounds: Bounds) -> dict[str, Metric]:
    metrics = {f"{name}_high": mean_metric(x > bounds.upper, where)}
    if bounds.lower is not None:
        metrics[f"{name}_low"] = mean_metric(x < bounds.lower, where)
    return metrics


def _moments(name: str, x: Tensor, where: Tensor, *, unbiased: bool) -> dict[str, Metric]:
    # The difference of squares would leave a small std nothing of float32's digits; Metal has no float64.
    x = x if x.device.type == "mps" else x.double()
    mean, square = mean_metric(x, where), mean_metric(x.square(), where)
    metrics = {f"{name}/mean": mean, f"{name}/square": square}
    if unbiased:
        metrics[f"{name}/rows"] = Metric(mean.count, 0)
    return metrics


def _divergence_metrics(old: Tensor, rollout: Tensor, mask: Tensor) -> dict[str, Metric]:
    valid = mask.bool().any(-1)
    log_ratio = old - rollout
    training_log_ppl, rollout_log_ppl = -_row_mean(old, mask), -_row_mean(rollout, mask)
    difference = training_log_ppl - rollout_log_ppl
    row_log_ratio = masked_sum(log_ratio, mask, dim=-1)

    def squared_ratio(x: Tensor) -> Tensor:
        return (2 * x.clamp(-_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)).exp()

    return {
        "training_ppl": mean_metric(training_log_ppl.exp(), valid),
        "training_log_ppl": mean_metric(training_log_ppl, valid),
        "rollout_ppl": mean_metric(rollout_log_ppl.exp(), valid),
        "rollout_log_ppl": mean_metric(rollout_log_ppl, valid),
        "kl": mean_metric(-log_ratio, mask),
        "k3_kl": mean_metric(log_ratio.exp() - log_ratio - 1, mask),
        "log_ppl_diff": mean_metric(difference, valid),
        "log_ppl_abs_diff": mean_metric(difference.abs(), valid),
        **_extremes("log_ppl_diff", difference, valid),
        "ppl_ratio": mean_metric(difference.exp(), valid),
        "chi2_token": mean_metric(squared_ratio(log_ratio) - 1, mask),
        "chi2_seq": mean_metric(squared_ratio(row_log_ratio) - 1, valid),
    }


def _weight_metrics(log_ratio: Tensor, mask: Tensor, config: RolloutCorrection) -> dict[str, Metric]:
    valid = mask.bool().any(-1)
    bounds = config.weight_bounds
    watched = Bounds(1 / bounds.upper, bounds.upper) if bounds.lower is None else bounds
    raw = _raw_weights(log_ratio, mask, config.rollout_is)
    weights = _bounded(raw, bounds)
    row_raw, row_weight = _row_mean(raw, mask), _row_mean(weights, mask)
    if config.rollout_is == "token":
        ratio, shown, where = raw, weights, mask
    else:  # verl clamps these above only
        ratio = shown = masked_sum(log_ratio, mask, dim=-1).clamp(max=_LOG_RATIO_BOUND).exp()
        where = valid
    metrics = {
        "rollout_is_mean": mean_metric(weights, mask),
        **_extremes("rollout_is", shown, where),
        **_outside("rollout_is_ratio_fraction", ratio, where, watched),
        **_moments("rollout_is_std", weights, mask, unbiased=False),
        "rollout_is_seq_mean": mean_metric(row_weight, valid),
        **_moments("rollout_is_seq_std", row_weight, valid, unbiased=True),
        **_extremes("rollout_is_seq", row_weight, valid),
        "rollout_is_seq_max_deviation": _extreme((row_weight - 1).abs(), valid, "max"),
        **_outside("rollout_is_seq_fraction", row_raw, valid, watched),
    }
    if bounds.lower is not None:
        metrics["rollout_is_oob_ratio"] = mean_metric(~_inside(raw, bounds), mask)
    if config.rollout_is_batch_normalize:
        metrics["rollout_is_batch_norm_factor"] = Metric(*weight_sums(weights, mask, config))
    return metrics


def _rejection_metrics(log_ratio: Tensor, mask: Tensor, config: RolloutCorrection) -> dict[str, Metric]:
    metrics = {}
    kept = mask.bool()
    for option, bounds in config.rejection_bounds.items():
        statistic = _statistic(log_ratio, mask, option)
        inside = _inside(statistic, bounds)
        metrics |= _lost(f"rollout_rs_{option}", inside, mask)
        metrics |= _statistic_metrics(f"rollout_rs_{option}", statistic, mask, bounds)
        kept = kept & inside
    return metrics | _lost("rollout_rs", kept, mask)


def _lost(name: str, kept: Tensor, mask: Tensor) -> dict[str, Metric]:
    lost = ~kept & mask.bool()
    return {
        f"{name}_masked_fraction": mean_metric(lost, mask),
        f"{name}_seq_masked_fraction": mean_metric(lost.any(-1), mask.bool().any(-1)),
    }


def _statistic_metrics(name: str, statistic: Tensor, mask: Tensor, bounds: Bounds) -> dict[str, Metric]:
    """Of a statistic `(B, T)` or `(B, 1)`; the mean and the std weigh a row by its tokens, as verl's do."""
    valid = mask.bool().any(-1)
    per_token = statistic.expand_as(mask)
    row = _row_mean(per_token, mask)
    x, where = (statistic, mask) if statistic.shape == mask.shape else (row, valid)
    lowest = 0.0 if bounds.lower is None else bounds.lower
    return {
        f"{name}_mean": mean_metric(per_token, mask),
        **_extremes(name, x, where),
        **_outside(f"{name}_fraction", x, where, bounds),
        **_moments(f"{name}_std", per_token.clamp(lowest, bounds.upper), mask, unbiased=False),
        f"{name}_seq_mean": mean_metric(row, valid),
        **_moments(f"{name}_seq_std", row, valid, unbiased=True),
        **_extremes(f"{name}_seq", row, valid),
        f"{name}_seq_max_deviation": _extreme(row.abs(), valid, "max"),
        **_outside(f"{name}_seq_fraction", row, valid, bounds),
    }
