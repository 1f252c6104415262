"""Reading token tensors under their mask, and nowhere else."""

import torch
from torch import Tensor


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype the objective computes in: float32, or float64 if the input already is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def keep(x: Tensor, mask: Tensor) -> Tensor:
    """`x` under the mask and 0 elsewhere, with zero gradient elsewhere.

    `torch.where` and not a product: 0 * NaN is NaN, in the backward pass too (README, departure 2).

    Args:
        x: `(B, T)`, any floating dtype; bfloat16 and float16 come back as float32.
        mask: `(B, T)`, 1 (or True) where the value counts.
    """
    x = x.to(compute_dtype(x))
    return torch.where(mask.bool(), x, x.new_zeros(()))


def masked_sum(x: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Sum of `x` over the tokens under the mask, of all (`dim=None`) or of each row (`dim=-1`)."""
    kept = keep(x, mask)
    return kept.sum() if dim is None else kept.sum(dim)


def require_token_shape(shape: torch.Size, **tensors: Tensor | None) -> None:
    """Raise a `ValueError` that names the tensor and both shapes unless every given tensor is `(B, T)`."""
    if len(shape) != 2:
        raise ValueError(f"token tensors are (B, T), got log_prob of shape {tuple(shape)}")
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {tuple(shape)} (B, T) like log_prob")


def to_tokens(name: str, x: Tensor, shape: torch.Size) -> Tensor:
    """`x` as `(B, T)`: a value per response, `(B,)` or `(B, 1)`, is spread over the tokens of its row.

    Raises:
        ValueError: the shape is none of these; names the tensor and both shapes.
    """
    rows, _ = shape
    if x.shape in ((rows,), (rows, 1)):
        return x.reshape(rows, 1).expand(shape)
    if x.shape != shape:
        raise ValueError(f"{name} has shape {tuple(x.shape)}, expected {tuple(shape)} (B, T), (B, 1) or (B,)")
    return x
