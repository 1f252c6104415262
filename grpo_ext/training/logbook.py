"""The run's log: all of it in a file of its own, one JSON object per line; the gist of it in the terminal."""

import json
from pathlib import Path

from transformers import ProgressCallback, TrainerCallback


def read_log(path: str | Path) -> list[dict]:
    """The entries of a log written by `JsonlLogCallback`; a last line that was cut short is left out.

    Args:
        path: of the `log.jsonl`.

    Raises:
        ValueError: a line before the last is not JSON, or not an entry; names file and line.
    """
    entries = []
    lines = Path(path).read_text(encoding="utf-8-sig").rstrip().split("\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path}, line {number}: not JSON ({error})") from error
        if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
            raise ValueError(f"{path}, line {number}: not a log entry (an object with a whole number 'step')")
        entries.append(entry)
    return entries


class JsonlLogCallback(TrainerCallback):
    """Appends every log entry, with its `step`, to a file, on the main process.

    A resumed run first drops the entries after the step that it resumes from, so that no step appears twice.
    """

    def __init__(self, path: str | Path):
        self._path = Path(path)

    def on_train_begin(self, args, state, control, **kwargs):
        if not state.is_world_process_zero:
            return
        kept = []
        if self._path.exists() and state.global_step > 0:
            kept = [entry for entry in read_log(self._path) if entry["step"] <= state.global_step]
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
        scratch.replace(self._path)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if state.is_world_process_zero and logs:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


class ShortProgressCallback(ProgressCallback):
    """The trainer's progress bar with the last reward and clip fraction on it, in place of every metric at each log."""

    SHOWN = (("reward", "reward"), ("clipped", "actor/pg_clipfrac"))

    def __init__(self):
        super().__init__()
        self._last: dict[str, str] = {}

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.training_bar is not None:
            self._last |= {label: f"{logs[name]:.3f}" for label, name in self.SHOWN if name in (logs or {})}
            self.training_bar.set_postfix(self._last, refresh=False)  # shown with the next step
