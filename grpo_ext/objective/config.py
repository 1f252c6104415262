"""The objective's settings and counts."""

import math
import warnings
from dataclasses import dataclass

from torch import Tensor

from .aggregation import LOSS_AGG_MODES
from .kl import KL_PENALTIES, REFERENCE_FREE_GRADIENT
from .policy_losses import POLICY_LOSSES

DEFAULT_KL_LOSS_COEF = 0.001


@dataclass(frozen=True)
class BatchInfo:
    """Counts over the optimizer step: every micro-batch and every rank.

    Attributes:
        dp_size: number of data-parallel ranks, over which gradients are averaged.
        batch_num_tokens: valid tokens of the step; `None` counts the tensor at hand (one rank only).
        global_batch_size: sequences of the step, fully masked ones included; `None` counts the rows at hand that have
            a valid token (one rank only).
    """

    dp_size: int = 1
    batch_num_tokens: int | float | Tensor | None = None
    global_batch_size: int | float | Tensor | None = None


@dataclass(frozen=True)
class ObjectiveConfig:
    """verl's actor keys, flat; every number of `ppo_loss` that is not a tensor.

    Attributes:
        policy_loss: name in `POLICY_LOSSES` (verl's `policy_loss.loss_mode`).
        clip_ratio: epsilon of the clip `[1 - epsilon, 1 + epsilon]`, for the bounds that are `None`.
        clip_ratio_low: lower epsilon; `None`: `clip_ratio`.
        clip_ratio_high: upper epsilon (Clip-Higher); `None`: `clip_ratio`.
        clip_ratio_c: dual-clip bound c > 1: where A < 0 the token loss is at most `-A * c`.
        loss_agg_mode: one of `LOSS_AGG_MODES`, for policy, entropy and KL alike.
        loss_scale_factor: tokens, constant of `seq-mean-token-sum-norm`; `None`: `T` in the bare function,
            `max_completion_length` in the trainer.
        entropy_coeff: weight of the entropy bonus, subtracted.
        use_kl_loss: whether the loss has the KL term.
        kl_loss_coef: weight of the KL term.
        kl_loss_type: one of `KL_PENALTIES`.

    Raises:
        ValueError: names the setting, its value and the remedy.
    """

    policy_loss: str = "vanilla"
    clip_ratio: float = 0.2
    clip_ratio_low: float | None = None
    clip_ratio_high: float | None = None
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: float | None = None
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = DEFAULT_KL_LOSS_COEF
    kl_loss_type: str = "low_var_kl"

    def __post_init__(self):
        for name, valid in (
            ("policy_loss", tuple(POLICY_LOSSES)),
            ("loss_agg_mode", LOSS_AGG_MODES),
            ("kl_loss_type", KL_PENALTIES),
        ):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(valid)}")
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is None and name != "clip_ratio":
                continue
            if not _is_number(value) or value < 0:
                raise ValueError(f"{name}={value!r} must be a finite number >= 0, such as 0.2")
        if not _is_number(self.clip_ratio_c) or self.clip_ratio_c <= 1:
            raise ValueError(
                f"clip_ratio_c={self.clip_ratio_c!r} must be greater than 1 (verl's default is 3.0); a value of 1 or "
                f"less would cap the loss of tokens that have not moved"
            )
        if self.loss_scale_factor is not None:
            if not _is_number(self.loss_scale_factor) or self.loss_scale_factor <= 0:
                raise ValueError(
                    f"loss_scale_factor={self.loss_scale_factor!r} must be a number of tokens > 0, or None"
                )
            if self.loss_agg_mode != "seq-mean-token-sum-norm":
                raise ValueError(
                    f"loss_scale_factor={self.loss_scale_factor!r} has no effect with "
                    f"loss_agg_mode={self.loss_agg_mode!r}; set loss_agg_mode='seq-mean-token-sum-norm' or leave "
                    f"loss_scale_factor=None"
                )
        if not isinstance(self.use_kl_loss, bool):
            raise ValueError(f"use_kl_loss={self.use_kl_loss!r} must be True or False")
        if not _is_number(self.entropy_coeff):
            raise ValueError(f"entropy_coeff={self.entropy_coeff!r} must be a finite number, such as 0.0")
        if not _is_number(self.kl_loss_coef) or self.kl_loss_coef < 0:
            raise ValueError(f"kl_loss_coef={self.kl_loss_coef!r} must be a finite number >= 0, such as 0.001")
        # README, departure 8. verl's own recipes write use_kl_loss=False with kl_loss_coef=0.0, so 0 passes.
        if not self.use_kl_loss and self.kl_loss_coef not in (0, DEFAULT_KL_LOSS_COEF):
            raise ValueError(
                f"kl_loss_coef={self.kl_loss_coef!r} has no effect with use_kl_loss=False; set use_kl_loss=True, or "
                f"drop kl_loss_coef"
            )
        if self.use_kl_loss and self.kl_loss_type in REFERENCE_FREE_GRADIENT:
            warnings.warn(
                f"kl_loss_type={self.kl_loss_type!r} as a loss has gradient 1 for every token: it ignores the "
                f"reference. Use 'k2', 'k3+' or 'low_var_kl+' for an unbiased gradient.",
                UserWarning,
                stacklevel=3,
            )

    @property
    def clip_low(self) -> float:
        """The lower epsilon in force (README, departure 7)."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The upper epsilon in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


def _is_number(value) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False
