"""The objective's settings and counts."""

import math
import warnings
from dataclasses import dataclass, fields

from torch import Tensor

from . import policy_losses  # noqa: F401  (fills the registry)
from .aggregation import LOSS_AGG_MODES
from .kl import KL_PENALTIES, REFERENCE_FREE_GRADIENT
from .policy_registry import POLICY_LOSSES, traits
from .rollout_correction import RolloutCorrection

DEFAULT_KL_LOSS_COEF = 0.001
# The settings of single losses, and what each must lie above.
_LOSS_NUMBERS = {
    "tau_pos": 0,
    "tau_neg": 0,
    "clip_cov_ratio": 0,
    "clip_cov_lb": -math.inf,
    "clip_cov_ub": -math.inf,
    "kl_cov_ratio": 0,
    "ppo_kl_coef": 0,
    "dro_beta": 0,
}
BYPASS_LOSS_TYPES = ("ppo_clip", "reinforce")


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
        tau_pos, tau_neg: `sapo`, steepness of the gate where A > 0 and elsewhere.
        clip_cov_ratio, clip_cov_lb, clip_cov_ub: `clip_cov`, share of the tokens that is drawn, and the covariances
            between which.
        kl_cov_ratio, ppo_kl_coef: `kl_cov`, share of the tokens that is held, and how strongly.
        dro_beta: `dro`, weight of the quadratic penalty; needed there.
        rollout_is, rollout_is_threshold, rollout_is_batch_normalize, rollout_rs, rollout_rs_threshold: as in
            `RolloutCorrection`. Read by `bypass_mode`, and by the trainer with every other loss.
        bypass_loss_type: `bypass_mode`, one of `BYPASS_LOSS_TYPES` (verl's `rollout_correction.loss_type`).

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
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = 0.0002
    ppo_kl_coef: float = 0.1
    dro_beta: float | None = None
    rollout_is: str | None = None
    rollout_is_threshold: float | str = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = None
    bypass_loss_type: str = "ppo_clip"

    def __post_init__(self):
        for name, valid in (
            ("policy_loss", tuple(POLICY_LOSSES)),
            ("loss_agg_mode", LOSS_AGG_MODES),
            ("kl_loss_type", KL_PENALTIES),
            ("bypass_loss_type", BYPASS_LOSS_TYPES),
        ):
            if getattr(self, name) not in valid:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose one of {', '.join(valid)}")
        for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            value = getattr(self, name)
            if value is None and name != "clip_ratio":
                continue
            if not is_number(value) or value < 0:
                raise ValueError(f"{name}={value!r} must be a finite number >= 0, such as 0.2")
        if not is_number(self.clip_ratio_c) or self.clip_ratio_c <= 1:
            raise ValueError(
                f"clip_ratio_c={self.clip_ratio_c!r} must be greater than 1 (verl's default is 3.0); a value of 1 or "
                f"less would cap the loss of tokens that have not moved"
            )
        if self.loss_scale_factor is not None:
            if not is_number(self.loss_scale_factor) or self.loss_scale_factor <= 0:
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
        if not is_number(self.entropy_coeff):
            raise ValueError(f"entropy_coeff={self.entropy_coeff!r} must be a finite number, such as 0.0")
        if not is_number(self.kl_loss_coef) or self.kl_loss_coef < 0:
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

        self._check_loss_keys()
        clipped_bypass = self.policy_loss == "bypass_mode" and self.bypass_loss_type == "ppo_clip"
        if clipped_bypass and self.rollout_is is not None:
            raise ValueError(
                f"rollout_is={self.rollout_is!r} has no effect with bypass_loss_type='ppo_clip', whose ratio is "
                f"already against the sampler; set bypass_loss_type='reinforce', or drop rollout_is"
            )

    def _check_loss_keys(self) -> None:
        """Refuse a setting of another loss, warn of a clip or an aggregation that the loss does not follow."""
        for name, above in _LOSS_NUMBERS.items():
            value = getattr(self, name)
            if (name, value) == ("dro_beta", None):  # needed by that loss only
                continue
            if not is_number(value) or value <= above:
                raise ValueError(f"{name}={value!r} must be a finite number" + (" > 0" if above == 0 else ""))
        if self.clip_cov_lb >= self.clip_cov_ub:
            raise ValueError(
                f"clip_cov_lb={self.clip_cov_lb!r} must be below clip_cov_ub={self.clip_cov_ub!r}; no token lies "
                f"between them"
            )
        for name in ("clip_cov_ratio", "kl_cov_ratio"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name}={getattr(self, name)!r} is a share of the tokens; it must be at most 1")
        if self.policy_loss == "dro" and self.dro_beta is None:
            raise ValueError(
                "policy_loss='dro' needs dro_beta, the weight of its penalty; set it, such as dro_beta=0.1"
            )
        known = traits(self.policy_loss)
        default = {f.name: f.default for f in fields(self)}
        if known.keys is not None:
            for name in (*_LOSS_NUMBERS, "bypass_loss_type"):
                if name not in known.keys and getattr(self, name) != default[name]:
                    owners = [loss for loss in POLICY_LOSSES if name in (traits(loss).keys or ())]
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} has no effect with policy_loss={self.policy_loss!r}; set "
                        f"policy_loss={' or '.join(map(repr, owners))}, or drop {name}"
                    )
            unread = [
                f"{name}={getattr(self, name)!r}"
                for name in ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")
                if name not in known.keys and getattr(self, name) != default[name]
            ]
            if unread:
                warnings.warn(
                    f"policy_loss={self.policy_loss!r} does not read {', '.join(unread)}", UserWarning, stacklevel=4
                )
        if known.fixed_agg_mode and self.loss_agg_mode != known.loss_agg_mode:
            warnings.warn(
                f"the policy term of policy_loss={self.policy_loss!r} is always reduced by {known.loss_agg_mode!r}; "
                f"loss_agg_mode={self.loss_agg_mode!r} holds for entropy and KL only",
                UserWarning,
                stacklevel=4,
            )
        elif known.loss_agg_mode not in (None, self.loss_agg_mode):
            warnings.warn(
                f"policy_loss={self.policy_loss!r} is meant with loss_agg_mode={known.loss_agg_mode!r}; "
                f"{self.loss_agg_mode!r} is set",
                UserWarning,
                stacklevel=4,
            )

    @property
    def rollout_correction(self) -> RolloutCorrection:
        """The settings of the rollout correction."""
        return RolloutCorrection(
            self.rollout_is,
            self.rollout_is_threshold,
            self.rollout_is_batch_normalize,
            self.rollout_rs,
            self.rollout_rs_threshold,
        )

    @property
    def clip_low(self) -> float:
        """The lower epsilon in force (README, departure 7)."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """The upper epsilon in force."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high


def is_number(value: object) -> bool:
    """Whether a setting is a finite number, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an int beyond the floats
        return False
