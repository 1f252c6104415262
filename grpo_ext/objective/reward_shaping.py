"""What is taken off the rewards before the advantages: the KL to the reference, and length beyond a buffer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .config import is_number
from .kl import kl_penalty as kl_estimate
from .masking import keep, masked_sum, require_token_shape
from .metrics import Metric

_ERROR_BOUND = 0.2


@torch.no_grad()
def kl_in_reward(
    old_log_prob: Tensor, ref_log_prob: Tensor, response_mask: Tensor, *, kl_penalty: str, kl_coef: float
) -> tuple[Tensor, Metric]:
    """The penalty to subtract from each token's reward, `kl_coef * kl(old_log_prob, ref_log_prob)`.

    Subtract its row sums from the outcomes too, before the statistics of the groups.

    Args:
        old_log_prob: `(B, T)`, nats, of the policy that the rollout came from.
        ref_log_prob: `(B, T)`, nats, the frozen reference's.
        response_mask: `(B, T)`, 1 where a token is trained on; values elsewhere are never read.
        kl_penalty: one of `KL_PENALTIES`.
        kl_coef: the controller's `value`.

    Returns:
        `(B, T)` penalty, 0 outside the mask; and what the controller's `update` takes as `current_kl` once all ranks'
        are combined (`actor/reward_kl_penalty`), nats: the mean over all rows, a fully masked one being 0, of the mean
        over the row's valid tokens, before the coefficient. The total number of rows is its `n_steps`.

    Raises:
        ValueError: unknown name, shapes that differ, or a coefficient that is no finite number >= 0.

    Source: verl 0.9.1, `ray_trainer.apply_kl_penalty`.
    """
    require_token_shape(old_log_prob.shape, ref_log_prob=ref_log_prob, response_mask=response_mask)
    _require_number("kl_coef", kl_coef, "0.001", zero=True)
    kl = kl_estimate(keep(old_log_prob, response_mask), keep(ref_log_prob, response_mask), kl_penalty)
    row_means = masked_sum(kl, response_mask, dim=-1) / response_mask.bool().sum(-1).clamp(min=1)
    return kl_coef * keep(kl, response_mask), Metric(row_means.sum(), len(row_means))


@dataclass(frozen=True)
class KLControl:
    """verl's `algorithm.kl_ctrl`: the coefficient of the KL in the reward.

    Attributes:
        kl_ctrl: `"fixed"`, or `"adaptive"`, which steers the KL towards `target_kl` (verl's `kl_ctrl.type`).
        kl_coef: the coefficient, or the one to start from.
        target_kl: nats per token; adaptive only.
        horizon: responses; the larger, the slower the coefficient moves; adaptive only.

    Raises:
        ValueError: names the setting, its value and the remedy; also for a setting without effect.
    """

    kl_ctrl: str = "fixed"
    kl_coef: float = 0.001
    target_kl: float = 0.1
    horizon: float = 10000

    def __post_init__(self):
        if self.kl_ctrl not in ("fixed", "adaptive"):
            raise ValueError(f"kl_ctrl={self.kl_ctrl!r} is unknown; choose one of fixed, adaptive")
        _require_number("kl_coef", self.kl_coef, "0.001", zero=True)
        for name, default in (("target_kl", 0.1), ("horizon", 10000)):
            value = getattr(self, name)
            _require_number(name, value, str(default))
            if self.kl_ctrl == "fixed" and value != default:
                raise ValueError(
                    f"{name}={value!r} has no effect with kl_ctrl='fixed'; set kl_ctrl='adaptive' or drop {name}"
                )
        if self.kl_ctrl == "adaptive" and self.kl_coef == 0:
            raise ValueError("kl_coef=0 stays 0 with kl_ctrl='adaptive', which multiplies it; start from 0.001 or so")

    def controller(self) -> "FixedKLController | AdaptiveKLController":
        """A new controller with these settings. Source: verl 0.9.1, `core_algos.get_kl_controller`."""
        if self.kl_ctrl == "fixed":
            return FixedKLController(self.kl_coef)
        return AdaptiveKLController(self.kl_coef, self.target_kl, self.horizon)


class FixedKLController:
    """The coefficient as it was set. Source: verl 0.9.1, `core_algos.FixedKLController`.

    Attributes:
        value: the coefficient.
    """

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Leave the coefficient alone."""

    def state(self) -> dict[str, str]:
        """What a checkpoint keeps: that there is nothing to keep."""
        return {"kl_ctrl": "fixed"}

    def load_state(self, state: dict) -> None:
        """Check that the checkpoint is of a fixed coefficient; the configured one stays in force.

        Raises:
            ValueError: it is of an adaptive one.
        """
        _require_same_kind(state, "fixed")


class AdaptiveKLController:
    """Raises the coefficient while the KL is above its target and lowers it below.

    `value *= 1 + clamp(current_kl / target_kl - 1, -0.2, 0.2) * n_steps / horizon`

    Attributes:
        value: the coefficient in force.

    Sources: Ziegler et al. 2019, arXiv:1909.08593; verl 0.9.1, `core_algos.AdaptiveKLController`.
    """

    def __init__(self, kl_coef: float, target_kl: float, horizon: float):
        self.value = kl_coef
        self._target_kl = target_kl
        self._horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Move the coefficient after a rollout.

        Args:
            current_kl: nats per token, of all ranks' rows (see `kl_in_reward`).
            n_steps: responses of the rollout, all ranks'.

        Raises:
            ValueError: `current_kl` is not finite, or the coefficient would not stay positive.
        """
        if not is_number(current_kl):
            raise ValueError(
                f"current_kl={current_kl!r} must be a finite number: the coefficient cannot follow it; check the "
                f"log-probabilities of policy and reference"
            )
        error = min(max(current_kl / self._target_kl - 1, -_ERROR_BOUND), _ERROR_BOUND)
        factor = 1 + error * n_steps / self._horizon
        if factor <= 0:
            raise ValueError(
                f"horizon={self._horizon!r} is too short for n_steps={n_steps} responses at a time: the KL coefficient "
                f"would be multiplied by {factor:.3g}; set horizon to {n_steps} or more"
            )
        self.value *= factor

    def state(self) -> dict[str, str | float]:
        """What a checkpoint keeps."""
        return {"kl_ctrl": "adaptive", "value": self.value}

    def load_state(self, state: dict) -> None:
        """Go on from a checkpoint's coefficient.

        Raises:
            ValueError: the checkpoint is of a fixed one.
        """
        _require_same_kind(state, "adaptive")
        self.value = state["value"]


def overlong_penalty(
    lengths: Tensor, max_response_length: int, overlong_buffer_len: int, overlong_buffer_penalty_factor: float
) -> Tensor:
    """DAPO's soft overlong punishment, to *add* to the rewards.

    `min(-(length - (max_response_length - overlong_buffer_len)) / overlong_buffer_len * factor, 0)`: 0 up to the
    buffer, `-factor` at the maximum and, as in verl, further down beyond it.

    Args:
        lengths: `(N,)`, tokens of each response, tool output included.
        max_response_length: tokens.
        overlong_buffer_len: tokens before the maximum over which the penalty grows.
        overlong_buffer_penalty_factor: the penalty at the maximum, in units of the reward.

    Returns:
        `(N,)`, <= 0; float32, or the dtype of `lengths` if that is a floating one.

    Raises:
        ValueError: a number <= 0, a buffer longer than the maximum, or `lengths` that are not `(N,)`.

    Sources: Yu et al. 2025, arXiv:2503.14476, equation 13; verl 0.9.1, `DAPORewardManager.run_single`.
    """
    _require_number("max_response_length", max_response_length, "1024")
    _require_number("overlong_buffer_len", overlong_buffer_len, "256")
    _require_number("overlong_buffer_penalty_factor", overlong_buffer_penalty_factor, "1.0")
    if overlong_buffer_len > max_response_length:
        raise ValueError(
            f"overlong_buffer_len={overlong_buffer_len!r} is longer than max_response_length={max_response_length!r}; "
            f"shorten the buffer or allow longer responses"
        )
    if lengths.ndim != 1:
        raise ValueError(f"lengths have shape {tuple(lengths.shape)}, expected (N,): tokens of each response")
    spare = max_response_length - overlong_buffer_len - lengths
    spare = spare if spare.is_floating_point() else spare.float()
    return spare.clamp(max=0) / overlong_buffer_len * overlong_buffer_penalty_factor


def _require_number(name: str, value: object, example: str, *, zero: bool = False) -> None:
    if not is_number(value) or value < 0 or (value == 0 and not zero):
        raise ValueError(f"{name}={value!r} must be a finite number {'>=' if zero else '>'} 0, such as {example}")


def _require_same_kind(state: dict, kl_ctrl: str) -> None:
    if state["kl_ctrl"] != kl_ctrl:
        raise ValueError(
            f"kl_ctrl={kl_ctrl!r} does not fit the checkpoint, which was made with kl_ctrl={state['kl_ctrl']!r}; "
            f"resume with that, or start a new run"
        )
