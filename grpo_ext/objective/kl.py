"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens."""

from collections.abc import Callable

import torch
from torch import Tensor

from .masking import compute_dtype

_LOG_RATIO_BOUND = 20.0  # nats; exp(20) is finite in float32
_K3_BOUND = 10.0


def _k1(d: Tensor) -> Tensor:
    return d


def _abs(d: Tensor) -> Tensor:
    return d.abs()


def _k2(d: Tensor) -> Tensor:
    return 0.5 * d.square()


def _k3(d: Tensor) -> Tensor:
    x = torch.clamp(-d, -_LOG_RATIO_BOUND, _LOG_RATIO_BOUND)
    return torch.clamp(x.exp() - x - 1, -_K3_BOUND, _K3_BOUND)


_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "kl": _k1,
    "k1": _k1,
    "abs": _abs,
    "mse": _k2,
    "k2": _k2,
    "low_var_kl": _k3,
    "k3": _k3,
}
KL_PENALTIES: tuple[str, ...] = tuple(name + plus for name in _ESTIMATORS for plus in ("", "+"))

# Estimators whose gradient does not contain the reference: as a loss they only lower the sampled log-probs.
REFERENCE_FREE_GRADIENT = ("kl", "k1")


def kl_penalty(log_prob: Tensor, ref_log_prob: Tensor, kl_penalty: str) -> Tensor:
    """Per-token estimate of KL(policy || reference), with `d = log_prob - ref_log_prob`.

    | name | value | gradient with respect to `log_prob` |
    | --- | --- | --- |
    | `kl`, `k1` | `d` | 1 |
    | `abs` | `abs(d)` | `sign(d)` |
    | `mse`, `k2` | `d**2 / 2` | `d` |
    | `low_var_kl`, `k3` | `clamp(exp(x) - x - 1, -10, 10)`, `x = clamp(-d, -20, 20)` | `1 - exp(-d)`; 0 at a clamp |
    | name + `+` | the named value | k2's: `d`, by the straight-through form |

    k1 and k3 have expectation KL, but their gradients do not have expectation grad KL; k2's does, hence the `+`.

    Args:
        log_prob: `(B, T)`, nats, the policy's, with gradient.
        ref_log_prob: `(B, T)`, nats, the frozen reference's.
        kl_penalty: one of `KL_PENALTIES`.

    Returns:
        `(B, T)`, nats; float32, or float64 if `log_prob` is.

    Raises:
        ValueError: unknown name (lists the valid ones), or shapes that differ.

    Sources: verl 0.9.1, `core_algos.kl_penalty`; Schulman, http://joschu.net/blog/kl-approx.html.
    """
    if kl_penalty not in KL_PENALTIES:
        raise ValueError(f"kl_penalty={kl_penalty!r} is unknown; choose one of {', '.join(KL_PENALTIES)}")
    if log_prob.shape != ref_log_prob.shape:
        raise ValueError(f"log_prob {tuple(log_prob.shape)} and ref_log_prob {tuple(ref_log_prob.shape)} differ")
    dtype = compute_dtype(log_prob)
    d = log_prob.to(dtype) - ref_log_prob.to(dtype)
    value = _ESTIMATORS[kl_penalty.removesuffix("+")](d)
    if not kl_penalty.endswith("+"):
        return value
    slope = _k2(d)
    return slope - slope.detach() + value.detach()
