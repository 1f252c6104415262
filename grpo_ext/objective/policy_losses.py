"""Policy losses by name: each maps log-probabilities and advantages to one loss per token.

Every function takes `log_prob` `(B, T)`, nats, the policy's, with gradient; `old_log_prob` `(B, T)`, nats, of the
policy that the step started from; `advantages` `(B, T)`; `response_mask` `(B, T)`, 1 where a token is trained on; and
`config`, the `ObjectiveConfig`. All are 0 outside the mask. Below, `A` is the advantage, `d = log_prob - old_log_prob`,
`r = exp(clamp(d, -20, 20))`, `sg` stops the gradient, and `low`, `high` are the two bounds of the clip.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .masking import keep, masked_sum
from .metrics import Metric, mean_metric
from .policy_registry import register_policy_loss
from .rollout_correction import rejection_mask, rollout_correction_metrics, rollout_correction_weights

if TYPE_CHECKING:
    from .config import ObjectiveConfig

_LOG_RATIO_BOUND = 20.0  # nats; the clamp stands before exp, so that a huge gap has zero gradient and not NaN
_GSPO_BOUND = 10.0  # nats, upwards only
_BINARY_EPS = 1e-8  # keeps the log of a certain token's complement finite
_WEIGHT_EPS = 1e-10  # keeps the log of a rollout weight of 0 finite

_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")

Output = tuple[Tensor, dict[str, Metric]]


class Ratio(NamedTuple):
    """The importance ratio and what it was made of, each `(B, T)`."""

    ratio: Tensor  # pi(token) / pi_old(token)
    log_ratio: Tensor  # nats, clamped to [-20, 20]


def importance_ratio(log_prob: Tensor, old_log_prob: Tensor) -> Ratio:
    """`exp(clamp(log_prob - old_log_prob, -20, 20))`.

    Source: verl 0.9.1, `core_algos.compute_policy_loss_vanilla`, which calls the clamped log ratio
    `negative_approx_kl`.
    """
    log_ratio = torch.clamp(log_prob - old_log_prob, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return Ratio(log_ratio.exp(), log_ratio)


def row_mean(x: Tensor, mask: Tensor) -> Tensor:
    """`(B, 1)`, the mean over each row's valid tokens; 0 for a row without any."""
    return (masked_sum(x, mask, dim=-1) / mask.bool().sum(-1).clamp(min=1)).unsqueeze(-1)


def _none(mask: Tensor) -> Metric:
    """A fraction that this loss reports as 0."""
    return mean_metric(torch.zeros_like(mask, dtype=torch.float32), mask)


@register_policy_loss("vanilla", proportional_to_advantage=True, keys=(*_CLIP, "clip_ratio_c"))
def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """PPO's clipped loss with two independent bounds (Clip-Higher) and an upper bound where A < 0 (dual-clip).

    With `r` the ratio: `clipped = max(-A r, -A clamp(r, 1 - low, 1 + high))`; the loss is `min(clipped, -A c)` where
    `A < 0`, else `clipped`.

    Args:
        log_prob: `(B, T)`, nats, the policy's, with gradient.
        old_log_prob: `(B, T)`, nats, of the policy that the rollout came from.
        advantages: `(B, T)`.
        response_mask: `(B, T)`, 1 where a token is trained on.
        config: reads `clip_ratio`, `clip_ratio_low`, `clip_ratio_high`, `clip_ratio_c`.

    Returns:
        `(B, T)` loss, and the means over valid tokens `actor/pg_clipfrac` (the upper or lower bound holds),
        `actor/pg_clipfrac_lower` (the dual-clip holds) and `actor/ppo_kl` (k1 estimate of KL(old || policy), nats).

    Sources: Schulman et al. 2017, arXiv:1707.06347; Yu et al. 2025 (DAPO), arXiv:2503.14476; Ye et al. 2019
    (dual-clip), arXiv:1912.09729; verl 0.9.1, `core_algos.compute_policy_loss_vanilla`.
    """
    ratio, log_ratio = importance_ratio(log_prob, old_log_prob)
    unclipped_loss = -advantages * ratio
    bounded_loss = -advantages * torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
    clipped_loss = torch.maximum(unclipped_loss, bounded_loss)
    ceiling = -advantages * config.clip_ratio_c
    loss = torch.where(advantages < 0, torch.minimum(ceiling, clipped_loss), clipped_loss)
    return loss, {
        "actor/pg_clipfrac": mean_metric(bounded_loss > unclipped_loss, response_mask),
        "actor/pg_clipfrac_lower": mean_metric((clipped_loss > ceiling) & (advantages < 0), response_mask),
        "actor/ppo_kl": mean_metric(-log_ratio, response_mask),
    }


@register_policy_loss("gspo", proportional_to_advantage=True, loss_agg_mode="seq-mean-token-mean", keys=_CLIP)
def gspo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """The clip on the ratio of whole sequences, length-normalised; each token carries its own gradient.

    `s = exp(min(log_prob - sg(log_prob) + sg(mean over the row of d), 10))`; the loss is
    `max(-A s, -A clamp(s, 1 - low, 1 + high))`. Recommended bounds: 3e-4 and 4e-4.

    Sources: Zheng et al. 2025, arXiv:2507.18071; verl 0.9.1, `core_algos.compute_policy_loss_gspo`.
    """
    log_ratio = log_prob - old_log_prob
    sequence = row_mean(log_ratio, response_mask).detach()
    ratio = torch.clamp(log_prob - log_prob.detach() + sequence, max=_GSPO_BOUND).exp()
    unclipped_loss = -advantages * ratio
    bounded_loss = -advantages * torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)
    return torch.maximum(unclipped_loss, bounded_loss), {
        "actor/pg_clipfrac": mean_metric(bounded_loss > unclipped_loss, response_mask),
        "actor/pg_clipfrac_lower": _none(response_mask),
        "actor/ppo_kl": mean_metric(-log_ratio, response_mask),
    }


@register_policy_loss(
    "sapo",
    proportional_to_advantage=True,
    loss_agg_mode="seq-mean-token-mean",
    fixed_agg_mode=True,
    keys=("tau_pos", "tau_neg"),
)
def sapo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """A sigmoid gate on the ratio in place of the clip: `-A (4 / tau) sigmoid(tau (r - 1))`.

    `tau` is `tau_pos` where `A > 0`, else `tau_neg`. At `r = 1` the gradient is the clip's. The policy term is always
    reduced by seq-mean-token-mean.

    Sources: Gao et al. 2025, arXiv:2511.20347; verl 0.9.1, `core_algos.compute_policy_loss_sapo`.
    """
    ratio, log_ratio = importance_ratio(log_prob, old_log_prob)
    tau = torch.where(advantages > 0, ratio.new_tensor(config.tau_pos), ratio.new_tensor(config.tau_neg))
    return -advantages * torch.sigmoid(tau * (ratio - 1)) * (4 / tau), {
        "actor/pg_clipfrac": _none(response_mask),
        "actor/pg_clipfrac_lower": _none(response_mask),
        "actor/ppo_kl": mean_metric(-log_ratio, response_mask),
    }


@register_policy_loss("gpg", proportional_to_advantage=True, loss_agg_mode="token-mean", keys=())
def gpg(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """The plain policy gradient, `-A log_prob`; reads neither the old policy nor a clip, and has no metrics.

    Sources: Chu et al. 2025, arXiv:2504.02546; verl 0.9.1, `core_algos.compute_policy_loss_gpg`.
    """
    return -advantages * log_prob, {}


@register_policy_loss("cispo", proportional_to_advantage=True, loss_agg_mode="token-mean", keys=_CLIP)
def cispo(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """A clipped weight without gradient, so that no token is dropped: `-sg(clamp(r, 1 - low, 1 + high)) A log_prob`.

    `actor/pg_clipfrac` counts the weights that the clamp changed.

    Sources: MiniMax 2025, arXiv:2506.13585; verl 0.9.1, `core_algos.compute_policy_loss_cispo`.
    """
    ratio, log_ratio = importance_ratio(log_prob, old_log_prob)
    weight = torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high).detach()
    return -weight * advantages * log_prob, {
        "actor/pg_clipfrac": mean_metric(ratio != weight, response_mask),
        "actor/pg_clipfrac_lower": _none(response_mask),
        "actor/ppo_kl": mean_metric(-log_ratio, response_mask),
    }


def _dppo(log_prob: Tensor, advantages: Tensor, mask: Tensor, ratio: Ratio, inside: Tensor, bound: float) -> Output:
    """`-A sg(min(r, bound)) log_prob` for the tokens inside the trust region, 0 for the others."""
    weight = torch.clamp(ratio.ratio, max=bound).detach()
    return -advantages * weight * log_prob * inside, {
        "actor/pg_clipfrac": mean_metric(~inside, mask),
        "actor/pg_clipfrac_lower": mean_metric((ratio.ratio > bound) & inside, mask),
        "actor/ppo_kl": mean_metric(-ratio.log_ratio, mask),
    }


@register_policy_loss(
    "dppo_tv", proportional_to_advantage=True, loss_agg_mode="token-mean", keys=(*_CLIP, "clip_ratio_c")
)
def dppo_tv(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """A trust region on the change of the token's probability, `p - p_old`, in place of the ratio's clip.

    `-A sg(min(r, clip_ratio_c)) log_prob`, left out where the update would leave the region: `p - p_old > high` with
    `A > 0`, or `p - p_old < -low` with `A <= 0`. The bounds are of probability, not of the ratio.

    Sources: arXiv:2602.04879; verl 0.9.1, `core_algos.compute_policy_loss_dppo_tv`.
    """
    change = (log_prob.exp() - old_log_prob.exp()).detach()
    inside = torch.where(advantages > 0, change <= config.clip_high, change >= -config.clip_low)
    ratio = importance_ratio(log_prob, old_log_prob)
    return _dppo(log_prob, advantages, response_mask, ratio, inside, config.clip_ratio_c)


@register_policy_loss(
    "dppo_kl", proportional_to_advantage=True, loss_agg_mode="token-mean", keys=(*_CLIP, "clip_ratio_c")
)
def dppo_kl(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """`dppo_tv` with the KL of the token against all others as the distance.

    `k = p_old (-d) + (1 - p_old) log((1 - p_old + 1e-8) / (1 - p + 1e-8))`, nats; a token is left out where `k` exceeds
    `high` with `A > 0` and `p > p_old`, or `low` with `A <= 0` and `p < p_old`.

    Sources: arXiv:2602.04879; verl 0.9.1, `core_algos.compute_policy_loss_dppo_kl`.
    """
    with torch.no_grad():
        p, p_old = log_prob.exp(), old_log_prob.exp()
        others = torch.log((1 - p_old + _BINARY_EPS) / (1 - p + _BINARY_EPS))
        binary_kl = p_old * (old_log_prob - log_prob) + (1 - p_old) * others
        upward = (binary_kl <= config.clip_high) | (p <= p_old)
        downward = (binary_kl <= config.clip_low) | (p >= p_old)
    ratio = importance_ratio(log_prob, old_log_prob)
    inside = torch.where(advantages > 0, upward, downward)
    return _dppo(log_prob, advantages, response_mask, ratio, inside, config.clip_ratio_c)


@register_policy_loss("dro", loss_agg_mode="token-mean", keys=("dro_beta",))
def dro(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """A quadratic penalty on the log ratio in place of a clip: `-(A log_prob - dro_beta d**2 / 2)`.

    Sources: Richemond et al. 2024, arXiv:2405.19107; verl 0.9.1, `core_algos.compute_policy_loss_dro`.
    """
    log_ratio = log_prob - old_log_prob
    loss = -(advantages * log_prob - 0.5 * config.dro_beta * log_ratio.square())
    return loss, {"actor/ppo_kl": mean_metric(-log_ratio, response_mask)}


@register_policy_loss(
    "geo_mean",
    proportional_to_advantage=True,
    loss_agg_mode="seq-mean-token-mean",
    fixed_agg_mode=True,
    keys=_CLIP,
    rollout_weights="geometric",
)
def geo_mean(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> Output:
    """The geometric mean of a row's clipped ratios (GMPO): one loss per sequence, the same on all its tokens.

    `-mean(A) exp(mean of s)` over the row, with `s = min(d, high)` where `A > 0`, `max(d, -low)` where `A < 0`, and 0
    where `A = 0`. The bounds are of the log ratio, nats; the paper has 0.4. The policy term is the mean over the
    sequences of the optimizer step (README, departure 19).

    Sources: Zhao et al. 2025, arXiv:2507.20673; verl 0.9.1, `core_algos.compute_policy_loss_geo_mean`.
    """
    log_ratio = log_prob - old_log_prob
    bounded = torch.clamp(log_ratio, -config.clip_low, config.clip_high)
    sign = torch.sign(advantages)
    clipped = sign * torch.minimum(sign * log_ratio, sign * bounded)
    loss = -row_mean(advantages, response_mask) * row_mean(clipped, response_mask).exp()
    changed = log_ratio != bounded
    return keep(loss.expand_as(log_prob), response_mask), {
        "actor/pg_clipfrac": mean_metric(changed & (advantages > 0), response_mask),
        "actor/pg_clipfrac_lower": mean_metric(changed & (advantages < 0), response_mask),
        "actor/ppo_kl": mean_metric(-log_ratio, response_mask),
    }


def covariance(log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
    """`(A - mean A) (log_prob - mean log_prob)` `(B, T)`, with means over all valid tokens; no gradient.

    Source: Cui et al. 2025, arXiv:2505.22617: tokens where it is large drive the entropy down.
    """
    count = response_mask.bool().sum().clamp(min=1)
    log_prob, advantages = log_prob.detach(), advantages.detach()
    return (advantages - masked_sum(advantages, response_mask) / count) * (
        log_prob - masked_sum(log_prob, response_mask) / count
    )


def _two_bounds(log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, config: ObjectiveConfig):
    """`-A exp(d)` and `-A clamp(exp(d), 1 - low, 1 + high)`, without the clamp of the log ratio."""
    ratio = (log_prob - old_log_prob).exp()
    return -advantages * ratio, -advantages * torch.clamp(ratio, 1 - config.clip_low, 1 + config.clip_high)


@torch.no_grad()
def tokens_left_by_clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`(B, T)`, 0 at tokens drawn among those of high covariance, 1 elsewhere; for the rows of an optimizer step.

    Candidates are the valid tokens that the ratio's clip leaves alone and whose covariance lies between `clip_cov_lb`
    and `clip_cov_ub`; `max(int(clip_cov_ratio * tokens), 1)` of them are drawn, by one permutation of the candidates in
    the order of the rows, on the host.
    """
    unclipped_loss, bounded_loss = _two_bounds(log_prob, old_log_prob, advantages, config)
    cov = covariance(log_prob, advantages, response_mask)
    candidate = response_mask.bool() & (bounded_loss <= unclipped_loss)
    candidate &= (cov > config.clip_cov_lb) & (cov < config.clip_cov_ub)
    where = candidate.flatten().nonzero()[:, 0]
    left = torch.ones_like(log_prob)
    if len(where):
        wanted = max(int(config.clip_cov_ratio * int(response_mask.bool().sum())), 1)
        drawn = torch.randperm(len(where), generator=generator)[:wanted]
        left.view(-1)[where[drawn.to(where.device)]] = 0
    return left


@register_policy_loss(
    "clip_cov",
    proportional_to_advantage=True,
    loss_agg_mode="token-mean",
    keys=(*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    step_function=tokens_left_by_clip_cov,
)
def clip_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    of_step: Tensor,
) -> Output:
    """The clipped loss without a few tokens, drawn among those that would lower the entropy most.

    `max(-A r, -A clamp(r, 1 - low, 1 + high)) of_step`, with `r = exp(d)` and `of_step` from `tokens_left_by_clip_cov`.
    `actor/pg_clipfrac` counts the tokens drawn.

    Sources: Cui et al. 2025, arXiv:2505.22617; verl 0.9.1, `core_algos.compute_policy_loss_clip_cov`.
    """
    unclipped_loss, bounded_loss = _two_bounds(log_prob, old_log_prob, advantages, config)
    return torch.maximum(unclipped_loss, bounded_loss) * of_step, {
        "actor/pg_clipfrac": mean_metric(of_step == 0, response_mask),
        "actor/ppo_kl": mean_metric(old_log_prob - log_prob, response_mask),
    }


@torch.no_grad()
def tokens_held_by_kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`(B, T)`, 1 at the `max(int(kl_cov_ratio * tokens), 1)` valid tokens of the highest covariance, 0 elsewhere."""
    where = response_mask.bool().flatten().nonzero()[:, 0]
    held = torch.zeros_like(log_prob)
    if len(where):
        cov = covariance(log_prob, advantages, response_mask).flatten()[where]
        wanted = max(int(config.kl_cov_ratio * len(where)), 1)
        held.view(-1)[where[cov.topk(wanted).indices]] = 1
    return held


@register_policy_loss(
    "kl_cov", loss_agg_mode="token-mean", keys=("kl_cov_ratio", "ppo_kl_coef"), step_function=tokens_held_by_kl_cov
)
def kl_cov(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    of_step: Tensor,
) -> Output:
    """The unclipped loss, and a KL penalty on the few tokens that would lower the entropy most.

    `-A r + ppo_kl_coef abs(d) of_step`, with `r = exp(d)` and `of_step` from `tokens_held_by_kl_cov`. `actor/ppo_kl`
    is the mean of `abs(d)`.

    Sources: Cui et al. 2025, arXiv:2505.22617; verl 0.9.1, `core_algos.compute_policy_loss_kl_cov`.
    """
    log_ratio = log_prob - old_log_prob
    loss = -advantages * log_ratio.exp() + config.ppo_kl_coef * log_ratio.abs() * of_step
    return loss, {"actor/ppo_kl": mean_metric(log_ratio.abs(), response_mask)}


@torch.no_grad()
def normalized_rollout_weights(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    generator: torch.Generator | None = None,
) -> Tensor:
    """`(B, T)`, the rollout weights of an optimizer step's rows, with mean 1 over the step."""
    return rollout_correction_weights(log_prob, old_log_prob, response_mask, config.rollout_correction)


@register_policy_loss(
    "bypass_mode",
    proportional_to_advantage=True,
    keys=(*_CLIP, "clip_ratio_c", "bypass_loss_type"),
    step_function=normalized_rollout_weights,
    needs_step=lambda config: config.rollout_is_batch_normalize and config.bypass_loss_type == "reinforce",
    rollout_weights="own",
)
def bypass_mode(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    config: ObjectiveConfig,
    of_step: Tensor | None = None,
) -> tuple[Tensor, dict[str, Metric], Tensor]:
    """Two policies in place of three: `old_log_prob` is the sampler's own, and no old policy is computed.

    `bypass_loss_type` "ppo_clip" is `vanilla` against the sampler, whose ratio corrects by itself; "reinforce" is
    `-A w log_prob` with the rollout weights `w` of the settings `rollout_is`. With `rollout_rs` rejected tokens leave
    the loss. Metrics: those of the loss and `rollout_corr/*`.

    Source: verl 0.9.1, `core_algos.compute_policy_loss_bypass_mode`.
    """
    correction = config.rollout_correction
    with torch.no_grad():
        kept = rejection_mask(log_prob, old_log_prob, response_mask, correction)
        diagnostics = rollout_correction_metrics(log_prob, old_log_prob, response_mask, correction)
    if config.bypass_loss_type == "ppo_clip":
        loss, metrics = vanilla(log_prob, old_log_prob, advantages, kept, config=config)
    else:
        weights = of_step
        if weights is None:
            weights = rollout_correction_weights(log_prob, old_log_prob, response_mask, correction)
        loss = -advantages * log_prob * (1 if weights is None else weights)
        metrics = {"actor/ppo_kl": mean_metric(old_log_prob - log_prob, kept)}
    return loss, metrics | diagnostics, kept


def geometric_weights(weights: Tensor, response_mask: Tensor) -> Tensor:
    """`(B, 1)`, the geometric mean of each row's rollout weights: `exp(mean log(w + 1e-10))`."""
    return row_mean((weights + _WEIGHT_EPS).log(), response_mask).exp()
