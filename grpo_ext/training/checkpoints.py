"""What exact resume needs beyond the Trainer's checkpoint, and how to tell a whole checkpoint from a torn one.

A checkpoint may lie inside a generation cycle: its responses are still trained on after it, so each rank keeps them
beside its random state. The marker is written last and at once, after every rank has written everything; older
checkpoints are removed only after that. A run killed at any point thus finds at least one checkpoint with a marker.
"""

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers.trainer_utils import sort_checkpoints

logger = logging.getLogger(__name__)

MARKER = "grpo_ext_complete.json"


def rank_file(folder: Path, rank: int) -> Path:
    """Where a rank keeps its part of the run's state."""
    return folder / f"grpo_ext_state_{rank}.pt"


def write_rank_state(folder: Path, rank: int, state: dict[str, Any]) -> None:
    """Write one rank's state at once: a reader sees all of it or nothing."""
    target = rank_file(folder, rank)
    scratch = target.with_suffix(".tmp")
    torch.save(_moved(state, "cpu"), scratch)
    os.replace(scratch, target)


def read_rank_state(folder: Path, rank: int, device: torch.device) -> dict[str, Any]:
    """One rank's state, its tensors on the device.

    Raises:
        ValueError: it is missing or cut short; names the file and the remedy.
    """
    path = rank_file(folder, rank)
    try:
        return _moved(torch.load(path, map_location="cpu", weights_only=True), device)
    except FileNotFoundError:
        raise ValueError(
            f"{path} is missing: the checkpoint was written with fewer ranks or by another trainer; resume with the "
            f"number of ranks that wrote it"
        ) from None
    except Exception as error:
        raise ValueError(f"{path} cannot be read ({error}); resume from an earlier checkpoint") from error


def write_marker(folder: Path, facts: dict[str, Any]) -> None:
    """Declare a checkpoint complete, with a list of its files; the last thing written into it."""
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    scratch = folder / (MARKER + ".tmp")
    scratch.write_text(json.dumps({**facts, "files": files}) + "\n", encoding="utf-8")
    os.replace(scratch, folder / MARKER)


def read_marker(folder: Path) -> dict[str, Any]:
    """The facts of a complete checkpoint.

    Raises:
        ValueError: the checkpoint is not complete; says what is missing and what to do.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a checkpoint's path, or True for the last one")
    try:
        facts = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"{folder} has no {MARKER}: it was cut short while being written, or written by another trainer, and lacks "
            f"what exact resume needs; resume from an earlier checkpoint"
        ) from None
    missing = [name for name in facts["files"] if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"{folder} has lost {len(missing)} of its files (first: {missing[0]}); resume from another checkpoint"
        )
    return facts


def last_complete(output_dir: str) -> Path:
    """The newest complete checkpoint of a run; says so when newer, torn ones are passed over.

    Raises:
        ValueError: there is none.
    """
    torn = []
    for path in reversed(sort_checkpoints(output_dir)):
        folder = Path(path)
        try:
            read_marker(folder)
        except ValueError as error:
            torn.append(str(error))
            continue
        if torn:
            logger.warning("resuming from %s instead: %s", folder.name, "; ".join(torn))
        return folder
    found = f"; {'; '.join(torn)}" if torn else ""
    raise ValueError(f"output_dir={output_dir!r} has no complete checkpoint to resume from, start anew{found}")


def remove_torn(folder: Path) -> None:
    """Remove what a killed run left of a checkpoint of the same step, before writing it again."""
    if folder.exists():
        (folder / MARKER).unlink(missing_ok=True)  # first, so that no one takes the rest for whole
        shutil.rmtree(folder)


def _moved(value: Any, device: Any) -> Any:
    """The same structure with every tensor on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_moved(item, device) for item in value]
    return value
