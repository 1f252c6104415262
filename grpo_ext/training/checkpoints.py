"""What exact resume needs beyond the Trainer's checkpoint, and how to tell a whole checkpoint from a torn one.

A checkpoint may lie inside a generation cycle: its responses are still trained on after it, so each rank keeps them
beside its random state. The marker is written last and at once, after every rank has written everything; older
checkpoints are removed only after that, and so is a complete one of the same step, which is moved aside before. A run
killed at any point thus finds at least one checkpoint with a marker.
"""

import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

logger = logging.getLogger(__name__)

MARKER = "grpo_ext_complete.json"
_REPLACED = "-replaced"
_NAME = re.compile(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)({_REPLACED})?")


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
    """Declare a checkpoint complete, with its files and their sizes; the last thing written into it."""
    files = {str(path.relative_to(folder)): path.stat().st_size for path in sorted(folder.rglob("*")) if path.is_file()}
    scratch = folder / (MARKER + ".tmp")
    scratch.write_text(json.dumps({**facts, "files": files}) + "\n", encoding="utf-8")
    os.replace(scratch, folder / MARKER)


def read_marker(folder: Path) -> dict[str, Any]:
    """The facts of a complete checkpoint.

    Raises:
        ValueError: the checkpoint is not complete; says what is missing or cut short and what to do.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; give a checkpoint's path, or True for the last one")
    try:
        facts = json.loads((folder / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise ValueError(
            f"{folder} has no {MARKER}: it was cut short while being written, or written by another trainer or with "
            f"save_only_model=True, and lacks what exact resume needs; resume from an earlier checkpoint"
        ) from None
    missing = [name for name in facts["files"] if not (folder / name).exists()]
    if missing:
        raise ValueError(
            f"{folder} has lost {len(missing)} of its files (first: {missing[0]}); resume from another checkpoint"
        )
    for name, size in facts["files"].items():
        present = (folder / name).stat().st_size
        if present < size:
            raise ValueError(
                f"{folder / name} was cut short ({present} of {size} bytes); resume from another checkpoint"
            )
    return facts


def last_usable(output_dir: str, check: Callable[[Path], Any] = read_marker) -> Path:
    """The newest checkpoint of a run that is accepted on every rank; says so when newer ones are passed over.

    Args:
        output_dir: of the run.
        check: raises `ValueError` for a checkpoint that is not accepted.

    Raises:
        ValueError: there is none.
    """
    accepted, refused = [], {}
    folders = sorted(_checkpoints(Path(output_dir)), key=_step, reverse=True)
    for folder in folders:
        try:
            check(folder)
            accepted.append(folder.name)
        except ValueError as error:
            refused[folder.name] = str(error)
    # Nodes with disks of their own may have been stopped between two checkpoints
    everywhere = set.intersection(*(set(names) for names in gather_object([accepted])))
    passed_over = []
    for folder in folders:
        if folder.name in everywhere:
            if passed_over:
                logger.warning("resuming from %s instead: %s", folder.name, "; ".join(passed_over))
            return folder
        passed_over.append(refused.get(folder.name, f"{folder} is not complete on every rank"))
    found = f"; {'; '.join(passed_over)}" if passed_over else ""
    raise ValueError(f"output_dir={output_dir!r} has no complete checkpoint to resume from, start anew{found}")


def make_room(folder: Path) -> None:
    """Clear the place of a checkpoint that is about to be written.

    What a killed run left there is removed. A complete checkpoint may be the only one: it is moved aside, where
    `last_usable` still finds it, until `remove_older`.
    """
    try:
        read_marker(folder)
    except ValueError:
        if folder.exists():
            _remove(folder)
        return
    aside = folder.with_name(folder.name + _REPLACED)
    if aside.exists():
        _remove(aside)
    folder.rename(aside)


def remove_older(newest: Path, limit: int | None, best: str | None) -> None:
    """Remove what the checkpoint just completed replaces, and all but `limit` checkpoints: it, the best, the latest.

    The Trainer's own rotation goes by step numbers if checkpoints are less than a second apart, and may then take one
    that was cut short, or that another run left, for the newest.
    """
    aside = newest.with_name(newest.name + _REPLACED)
    if aside.exists():
        _remove(aside)
    if limit is None or limit < 1:
        return
    protected = {newest} if best is None else {newest, Path(best)}
    others = [folder for folder in _checkpoints(newest.parent) if folder not in protected]
    others.sort(key=lambda folder: ((folder / MARKER).exists(), folder.stat().st_mtime_ns, _step(folder)))
    for folder in others[: max(0, len(others) + len(protected) - limit)]:
        _remove(folder, ignore_errors=True)


def _checkpoints(output_dir: Path) -> list[Path]:
    return [folder for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*") if _NAME.fullmatch(folder.name)]


def _step(folder: Path) -> tuple[int, bool]:
    """For sorting by step, one that was to be replaced before its replacement."""
    step, replaced = _NAME.fullmatch(folder.name).groups()
    return int(step), replaced is None


def _remove(folder: Path, ignore_errors: bool = False) -> None:
    (folder / MARKER).unlink(missing_ok=True)  # first, so that no one takes the rest for whole
    shutil.rmtree(folder, ignore_errors=ignore_errors)


def _moved(value: Any, device: Any) -> Any:
    """The same structure with every tensor on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_moved(item, device) for item in value]
    return value
