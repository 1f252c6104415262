"""`loss_agg_mode`: one reduction from `(B, T)` to a scalar, for policy, entropy and KL alike."""

from collections.abc import Callable

from torch import Tensor

from .masking import masked_sum
from .metrics import Metric

Count = Tensor | float


def _token_mean(loss: Tensor, mask: Tensor, tokens: Count, rows: Count, scale: float) -> tuple[Tensor, Count]:
    return masked_sum(loss, mask), tokens


def _token_sum(loss: Tensor, mask: Tensor, tokens: Count, rows: Count, scale: float) -> tuple[Tensor, Count]:
    return masked_sum(loss, mask), 1


def _seq_mean_token_sum(loss: Tensor, mask: Tensor, tokens: Count, rows: Count, scale: float) -> tuple[Tensor, Count]:
    return masked_sum(loss, mask), rows


def _seq_mean_token_sum_norm(
    loss: Tensor, mask: Tensor, tokens: Count, rows: Count, scale: float
) -> tuple[Tensor, Count]:
    return masked_sum(loss, mask) / scale, rows


def _seq_mean_token_mean(loss: Tensor, mask: Tensor, tokens: Count, rows: Count, scale: float) -> tuple[Tensor, Count]:
    return (masked_sum(loss, mask, dim=-1) / mask.bool().sum(-1).clamp(min=1)).sum(), rows


# Each mode: the numerator, a sum over this tensor, and which count over the optimizer step divides it.
_REDUCTIONS: dict[str, Callable[..., tuple[Tensor, Count]]] = {
    "token-mean": _token_mean,
    "seq-mean-token-sum": _seq_mean_token_sum,
    "seq-mean-token-sum-norm": _seq_mean_token_sum_norm,
    "seq-mean-token-mean": _seq_mean_token_mean,
    "token-sum": _token_sum,
}
LOSS_AGG_MODES: tuple[str, ...] = tuple(_REDUCTIONS)

# The count that a mode needs; None where it needs none.
_NEEDED_COUNT = {
    "token-mean": "batch_num_tokens",
    "seq-mean-token-sum": "global_batch_size",
    "seq-mean-token-sum-norm": "global_batch_size",
    "seq-mean-token-mean": "global_batch_size",
    "token-sum": None,
}


def agg_metric(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Metric:
    """`agg_loss` with its numerator and denominator kept apart; same arguments, same errors."""
    if loss_agg_mode not in _REDUCTIONS:
        raise ValueError(f"loss_agg_mode={loss_agg_mode!r} is unknown; choose one of {', '.join(LOSS_AGG_MODES)}")
    if loss_mat.shape != loss_mask.shape or loss_mat.ndim != 2:
        raise ValueError(f"loss_mat {tuple(loss_mat.shape)} and loss_mask {tuple(loss_mask.shape)} must both be (B, T)")
    needed = _NEEDED_COUNT[loss_agg_mode]
    given = {"batch_num_tokens": batch_num_tokens, "global_batch_size": global_batch_size}.get(needed)
    if dp_size > 1 and needed is not None and given is None:
        raise ValueError(
            f"dp_size={dp_size} with loss_agg_mode={loss_agg_mode!r} needs {needed}, the count over the optimizer step "
            f"on all ranks; one rank's own count would weight the ranks wrongly"
        )
    counted = loss_mask.bool()
    # At least 1, so that an empty tensor gives 0 and not NaN (README, departure 1)
    tokens = counted.sum().clamp(min=1) if batch_num_tokens is None else _at_least_one(batch_num_tokens)
    rows = counted.any(-1).sum().clamp(min=1) if global_batch_size is None else _at_least_one(global_batch_size)
    scale = max(loss_mat.shape[-1], 1) if loss_scale_factor is None else loss_scale_factor
    if scale <= 0:
        raise ValueError(f"loss_scale_factor={loss_scale_factor!r} must be a number of tokens > 0, or None")
    numerator, denominator = _REDUCTIONS[loss_agg_mode](loss_mat, loss_mask, tokens, rows, scale)
    # Without a count over the step, numerator and denominator are this tensor's own and combine as a mean.
    share = given is not None or needed is None
    return Metric(numerator * dp_size if share else numerator, denominator, share=share)


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    *,
    dp_size: int = 1,
    batch_num_tokens: Count | None = None,
    global_batch_size: Count | None = None,
    loss_scale_factor: float | None = None,
) -> Tensor:
    """Reduce a per-token loss to this micro-batch's share of the optimizer step's loss.

    | `loss_agg_mode` | value |
    | --- | --- |
    | `token-mean` | `sum(loss * mask) / batch_num_tokens * dp_size` |
    | `seq-mean-token-sum` | `sum over rows of (row sum) / global_batch_size * dp_size` |
    | `seq-mean-token-sum-norm` | the same, divided by `loss_scale_factor` |
    | `seq-mean-token-mean` | `sum over rows of (row sum / max(row tokens, 1)) / global_batch_size * dp_size` |
    | `token-sum` | `sum(loss * mask) * dp_size` |

    The shares of all micro-batches add up, and averaging them over `dp_size` ranks, as DDP and ZeRO do with
    gradients, gives the loss of all rows as one tensor.

    Args:
        loss_mat: `(B, T)`, one loss per token; bfloat16 and float16 are summed in float32.
        loss_mask: `(B, T)`, 1 where the token counts; values elsewhere are never read.
        loss_agg_mode: one of `LOSS_AGG_MODES`.
        dp_size: number of data-parallel ranks.
        batch_num_tokens: valid tokens of the optimizer step, all micro-batches and ranks; `None`: of this tensor.
        global_batch_size: sequences of the optimizer step, fully masked ones included; `None`: rows of this tensor
            that have a valid token.
        loss_scale_factor: tokens, the constant of `seq-mean-token-sum-norm`; `None`: `T`.

    Returns:
        Scalar, attached to the graph; 0 with zero gradient if nothing is under the mask.

    Raises:
        ValueError: unknown mode (lists the valid ones); shapes differ; `dp_size > 1` without the mode's count;
            `loss_scale_factor <= 0`.

    Source: verl 0.9.1, `core_algos.agg_loss`.
    """
    return agg_metric(
        loss_mat,
        loss_mask,
        loss_agg_mode,
        dp_size=dp_size,
        batch_num_tokens=batch_num_tokens,
        global_batch_size=global_batch_size,
        loss_scale_factor=loss_scale_factor,
    ).value


def _at_least_one(count: Count) -> Count:
    return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
