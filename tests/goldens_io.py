"""Recorded numbers of verl 0.9.1 as tensors."""

import json
from pathlib import Path

import torch

FOLDER = Path(__file__).parent / "goldens"
# verl computes clip fractions in float32 whatever the dtype; everything else is float64 and agrees to rounding.
FLOAT64 = {"rtol": 1e-12, "atol": 1e-12}
FLOAT32 = {"rtol": 1e-6, "atol": 1e-6}


def cases(name: str) -> list[dict]:
    """The cases of one golden file."""
    return json.loads((FOLDER / f"{name}.json").read_text())["cases"]


def tensor(values, *, grad: bool = False) -> torch.Tensor | None:
    """A recorded array: float64 for numbers, bool for masks, `None` for null."""
    if values is None:
        return None
    first = values
    while isinstance(first, list):
        first = first[0]
    if isinstance(first, bool):
        return torch.tensor(values)
    return torch.tensor(_floats(values), dtype=torch.float64).requires_grad_(grad)


def _floats(values):
    return [_floats(value) for value in values] if isinstance(values, list) else float(values)
