"""Policy losses by name: each maps log-probabilities and advantages to one loss per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from .metrics import Metric, mean_metric

if TYPE_CHECKING:
    from .config import ObjectiveConfig

_LOG_RATIO_BOUND = 20.0  # nats; the clamp stands before exp, so that a huge gap has zero gradient and not NaN

PolicyLoss = Callable[..., "Tensor | tuple[Tensor, dict[str, Tensor | Metric]]"]
POLICY_LOSSES: dict[str, PolicyLoss] = {}


# Losses whose value and gradient are 0 for a token with advantage 0, whatever the parameters.
PROPORTIONAL_TO_ADVANTAGE: set[str] = set()


def register_policy_loss(name: str, *, proportional_to_advantage: bool = False) -> Callable[[PolicyLoss], PolicyLoss]:
    """Make a policy loss available as `ObjectiveConfig(policy_loss=name)`; a decorator.

    The decorated function is called as `f(log_prob, old_log_prob, advantages, response_mask, *, config)` with `(B, T)`
    tensors (float32 or float64, 0 outside the mask) and the `ObjectiveConfig`. It returns the `(B, T)` loss per token,
    or that and a dict of metrics, each a `(B, T)` tensor (averaged over valid tokens) or a `Metric`, of the same names
    in every call, since they are reduced over ranks. Aggregation,
    rollout weights, entropy and KL follow without it.

    Args:
        name: the new name.
        proportional_to_advantage: whether loss and gradient of a token are 0 where its advantage is; rows without any
            other token then need no backward pass.

    Raises:
        ValueError: the name is taken.
        TypeError: the name is not text, as when the parentheses are left out.
    """

    if not isinstance(name, str) or not name.strip():
        raise TypeError(f'register_policy_loss takes a name, got {name!r}; write @register_policy_loss("name")')

    def register(function: PolicyLoss) -> PolicyLoss:
        if name in POLICY_LOSSES:
            raise ValueError(f"policy loss {name!r} is already registered; choose another name")
        POLICY_LOSSES[name] = function
        if proportional_to_advantage:
            PROPORTIONAL_TO_ADVANTAGE.add(name)
        return function

    return register


def checked_output(name: str, output: object, log_prob: Tensor) -> tuple[Tensor, dict[str, Tensor | Metric]]:
    """The loss per token and the metrics that a policy loss returned.

    Raises:
        ValueError: it is neither a `(B, T)` tensor nor that and a dict of metrics, or has lost its gradient; names the
            loss.
    """
    loss, metrics = output if isinstance(output, tuple) and len(output) == 2 else (output, {})
    if not isinstance(loss, Tensor) or loss.shape != log_prob.shape:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(
            f"policy loss {name!r} returned {got}, expected a tensor of shape {tuple(log_prob.shape)} (B, T): one loss "
            f"per token, not reduced; or that and a dict of metrics"
        )
    if log_prob.requires_grad and torch.is_grad_enabled() and not loss.requires_grad:
        raise ValueError(f"policy loss {name!r} returned a loss without a gradient; do not detach log_prob")
    if not isinstance(metrics, dict):
        raise ValueError(f"policy loss {name!r} returned its metrics as a {type(metrics).__name__}, expected a dict")
    for key, value in metrics.items():
        per_token = isinstance(value, Tensor) and value.shape == log_prob.shape
        if not isinstance(key, str) or not (per_token or isinstance(value, Metric)):
            got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise ValueError(
                f"policy loss {name!r} returned the metric {key!r} as {got}; a metric has a name of text, and is a "
                f"(B, T) tensor or a grpo_ext.Metric"
            )
    return loss, metrics


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


@register_policy_loss("vanilla", proportional_to_advantage=True)
def vanilla(
    log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor, *, config: ObjectiveConfig
) -> tuple[Tensor, dict[str, Metric]]:
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
