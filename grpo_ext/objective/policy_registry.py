"""The registry of policy losses: their functions by name, and what the rest must know of each beside its formula."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .metrics import Metric

if TYPE_CHECKING:
    from .config import ObjectiveConfig

PolicyLoss = Callable[..., "Tensor | tuple"]
StepFunction = Callable[..., Tensor]
POLICY_LOSSES: dict[str, PolicyLoss] = {}

ROLLOUT_WEIGHTS = ("product", "geometric", "own")


@dataclass(frozen=True)
class Traits:
    """What the assembly and the trainer must know of a policy loss beside its formula.

    Attributes:
        proportional_to_advantage: loss and gradient of a token are 0 where its advantage is, whatever the parameters.
        loss_agg_mode: the recommended one; `None`: none in particular.
        fixed_agg_mode: the policy term is reduced by it whatever the setting says; entropy and KL follow the setting.
        keys: settings that the loss reads; `None`: unknown.
        step_function: makes a `(B, T)` tensor out of all rows of the optimizer step, which the loss gets as `of_step`.
        needs_step: whether these settings use it.
        rollout_weights: how `rollout_is_weights` enter: `product` with the loss of each token, `geometric` mean over
            the row, or `own`, the loss makes them itself.
    """

    proportional_to_advantage: bool = False
    loss_agg_mode: str | None = None
    fixed_agg_mode: bool = False
    keys: tuple[str, ...] | None = None
    step_function: StepFunction | None = None
    needs_step: Callable[[ObjectiveConfig], bool] = lambda config: True
    rollout_weights: str = "product"


_TRAITS: dict[str, Traits] = {}


def traits(name: str) -> Traits:
    """Those of a registered policy loss; the defaults for one that was put into `POLICY_LOSSES` by hand."""
    return _TRAITS.get(name, Traits())


def step_function(config: ObjectiveConfig) -> StepFunction | None:
    """What must see the whole optimizer step before its first loss; `None` where each micro-batch stands alone."""
    known = traits(config.policy_loss)
    return known.step_function if known.step_function is not None and known.needs_step(config) else None


def register_policy_loss(name: str, **known) -> Callable[[PolicyLoss], PolicyLoss]:
    """Make a policy loss available as `ObjectiveConfig(policy_loss=name)`; a decorator.

    The decorated function is called as `f(log_prob, old_log_prob, advantages, response_mask, *, config)` with `(B, T)`
    tensors (float32 or float64, 0 outside the mask) and the `ObjectiveConfig`. It returns the `(B, T)` loss per token,
    or that and a dict of metrics, each a `(B, T)` tensor (averaged over valid tokens) or a `Metric`, of the same names
    in every call, since they are reduced over ranks; or these two and the `(B, T)` mask of the tokens that it leaves in
    the loss. Aggregation, rollout weights, entropy and KL follow without it.

    Args:
        name: the new name.
        proportional_to_advantage: whether loss and gradient of a token are 0 where its advantage is; rows without any
            other token then need no backward pass.
        loss_agg_mode: the recommended aggregation; a config with another one warns.
        fixed_agg_mode: whether the policy term is always reduced by `loss_agg_mode`.
        keys: the settings that it reads; others that are set are refused. `None`: all may be.
        step_function: for a loss that looks at the whole optimizer step: called as the loss is, with all its rows and
            a `generator` on the host, without gradients. It returns a `(B, T)` tensor; the loss gets its rows of it as
            the keyword `of_step`.
        needs_step: from the `ObjectiveConfig` to whether `step_function` is needed.
        rollout_weights: `product` (default), `geometric` or `own`.

    Raises:
        ValueError: the name is taken, or `rollout_weights` is unknown.
        TypeError: the name is not text, as when the parentheses are left out; or a keyword is unknown.
    """
    if not isinstance(name, str) or not name.strip():
        raise TypeError(f'register_policy_loss takes a name, got {name!r}; write @register_policy_loss("name")')
    described = Traits(**known)
    if described.rollout_weights not in ROLLOUT_WEIGHTS:
        raise ValueError(
            f"rollout_weights={described.rollout_weights!r} is unknown; choose one of {', '.join(ROLLOUT_WEIGHTS)}"
        )

    def register(function: PolicyLoss) -> PolicyLoss:
        if name in POLICY_LOSSES:
            raise ValueError(f"policy loss {name!r} is already registered; choose another name")
        POLICY_LOSSES[name], _TRAITS[name] = function, described
        return function

    return register


def checked_output(
    name: str, output: object, log_prob: Tensor, response_mask: Tensor
) -> tuple[Tensor, dict[str, Tensor | Metric], Tensor]:
    """The loss per token, the metrics and the mask that a policy loss returned.

    Raises:
        ValueError: it is neither a `(B, T)` tensor nor that with a dict of metrics and a mask, or has lost its
            gradient; names the loss.
    """
    parts = output if isinstance(output, tuple) and len(output) in (2, 3) else (output, {})
    loss, metrics, kept = parts if len(parts) == 3 else (*parts, response_mask)
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
    if not isinstance(kept, Tensor) or kept.shape != log_prob.shape:
        raise ValueError(f"policy loss {name!r} returned a mask that is no tensor of shape {tuple(log_prob.shape)}")
    return loss, metrics, kept
