"""What a run's folder says: its log, settings, summary and texts, whole or cut short, and the trouble found in them."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from .texts import Answer, Sample, pair_answers, read_samples

ACCURACY = "summary.json/accuracy"  # the curve made of the accuracy before and after
STATE_SETTINGS = ("max_steps", "num_train_epochs", "train_batch_size", "logging_steps", "save_steps", "eval_steps")
_SECRET = re.compile(r"((api|hub|hf|access|auth)_?token|api_?key|secret|password)$", re.IGNORECASE)


@dataclass
class Run:
    """One run, as far as its files tell."""

    label: str  # shortest end of its path that no other run of the page has
    folder: Path  # where its settings, summary and texts lie
    log: Path  # where the entries come from
    entries: list[dict]  # of the log, each with a whole number `step`
    written: float  # when the log was last written, seconds since 1970
    settings: dict[str, object] = field(default_factory=dict)  # flat, `section.name`
    settings_file: str | None = None  # where they come from
    summary: dict = field(default_factory=dict)
    findings: list | None = None  # of `diagnose`; None: it could not be asked
    sample: Sample | None = None  # of the logged completions; None: none were logged
    answers: list[Answer] = field(default_factory=list)  # greedy, before and after
    notes: list[str] = field(default_factory=list)  # what is missing, or was left out of the files

    @property
    def last_step(self) -> int:
        return max(entry["step"] for entry in self.entries)

    @property
    def max_steps(self) -> int | None:
        steps = self.setting("max_steps")
        return steps if is_number(steps) and steps > 0 else None

    @property
    def finished(self) -> bool:
        last = self.last_step
        if self.max_steps is not None and last >= self.max_steps:
            return True
        return any("train_runtime" in entry and entry["step"] == last for entry in self.entries)

    def setting(self, name: str) -> object:
        """A setting by its own name, in whatever section it is; `None` if it is not there."""
        return next((value for key, value in self.settings.items() if setting_name(key) == name), None)

    def series(self) -> dict[str, dict[int, float]]:
        """Every number of the log by key, then by step; of a step logged twice the later one."""
        found: dict[str, dict[int, float]] = {}
        for entry in self.entries:
            for key, value in entry.items():
                if key != "step" and is_number(value):
                    found.setdefault(key, {})[entry["step"]] = as_float(value)
        accuracy = {}
        for step, name in ((0, "accuracy_before"), (self.summary.get("steps"), "accuracy_after")):
            if is_number(self.summary.get(name)) and is_number(step):
                accuracy[int(step)] = as_float(self.summary[name])
        if accuracy:
            found[ACCURACY] = accuracy
        return {key: dict(sorted(points.items())) for key, points in found.items()}

    def seconds(self) -> tuple[float, str] | None:
        """How long the run took, and from where that is known."""
        if self.finished and is_number(self.summary.get("seconds")) and self.summary.get("steps") == self.last_step:
            return self.summary["seconds"], "summary.json"
        ended = [entry["train_runtime"] for entry in self.entries if is_number(entry.get("train_runtime"))]
        if self.finished and ended:
            return ended[-1], "train_runtime"
        total, before = 0.0, 0
        for step, seconds in self.series().get("step_time", {}).items():
            # TRL logs the mean of the steps since the last entry
            total, before = total + seconds * (step - before), step
        return (total, "sum of step_time") if before else None


def is_number(value: object) -> bool:
    """Whether a JSON value is a number (true and false are none)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def as_float(value: int | float) -> float:
    """The number; infinite if it is too large for a float."""
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def setting_name(key: str) -> str:
    """A setting's own name: `learning_rate` of `training.learning_rate`; of one nested deeper the whole key."""
    return key.split(".")[-1] if key.count(".") <= 1 else key


def read_lines(path: Path, check: Callable[[object], bool], wanted: str) -> tuple[list[dict], list[str]]:
    """The objects of a file with one JSON object per line, and a note if the last line was cut short.

    Args:
        path: of the file.
        check: whether an object is what is wanted.
        wanted: what that is, for the error.

    Raises:
        ValueError: a line is not JSON, or not what is wanted; names file and line. The last line is let off if it
            has no newline: a run that goes on, or was killed, is still writing it.
    """
    entries = []
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return entries, [f"The last line of {path.name} (line {number}) was cut short and is left out."]
            raise ValueError(f"{path}, line {number}: not JSON ({_first_line(error)})") from error
        if not isinstance(entry, dict) or not check(entry):
            raise ValueError(f"{path}, line {number}: {wanted}")
        entries.append(entry)
    return entries, []


def read_object(path: Path) -> dict:
    """The JSON object in a file.

    Raises:
        ValueError: it is not JSON (names file and line), or no object.
    """
    try:
        content = json.loads(path.read_bytes().decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        line = getattr(error, "lineno", 1)
        raise ValueError(f"{path}, line {line}: not JSON ({_first_line(error)})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not a JSON object")
    return content


def _first_line(error: Exception) -> str:
    return str(error).split("\n")[0]


def has_step(entry: dict) -> bool:
    """Whether an entry has a step that can be drawn."""
    step = entry.get("step")
    return is_number(step) and isinstance(step, int) and 0 <= step < 2**53


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has the name that transformers gives to checkpoints."""
    return re.fullmatch(r"checkpoint-\d+", folder.name) is not None


def find_logs(path: Path) -> list[Path]:
    """The log of a run first: its `log.jsonl`, or else its `trainer_state.json`, or its last checkpoint's.

    After a checkpoint's come those of the checkpoints before it, should the last have been cut short.

    Raises:
        ValueError: the path is no run.
    """
    if path.is_file() and path.suffix in (".jsonl", ".json"):
        return [path]
    if path.is_file():
        raise ValueError(f"{path} is no run: give its folder, its log.jsonl or a trainer_state.json")
    if not path.is_dir():
        raise ValueError(f"{path} is no run: there is no such file or folder")
    for own in (path / "log.jsonl", path / "trainer_state.json"):
        if own.exists():
            return [own]
    checkpoints = [folder for folder in path.glob("checkpoint-*") if is_checkpoint(folder)]
    checkpoints.sort(key=lambda folder: int(folder.name.removeprefix("checkpoint-")), reverse=True)
    states = [folder / "trainer_state.json" for folder in checkpoints if (folder / "trainer_state.json").exists()]
    if not states:
        what = "it has no log.jsonl, and no trainer_state.json of its own or of a checkpoint"
        raise ValueError(f"{path} is no run: {what if any(path.iterdir()) else 'the folder is empty'}")
    return states


def read_entries(log: Path) -> tuple[list[dict], dict, list[str]]:
    """The entries of a log or of a trainer state, what else the state says, and notes.

    Raises:
        ValueError: the file is empty or malformed; names file and line.
    """
    wanted = "not a log entry (an object with a whole number 'step')"
    state, notes = {}, []
    if log.suffix == ".jsonl":
        entries, notes = read_lines(log, has_step, wanted)
    else:
        state = read_object(log)
        entries = state.pop("log_history", None)
        if not isinstance(entries, list):
            raise ValueError(f"{log}: no list 'log_history'; give a trainer_state.json as TRL's trainer writes it")
        for number, entry in enumerate(entries, start=1):
            if not isinstance(entry, dict) or not has_step(entry):
                raise ValueError(f"{log}, entry {number} of log_history: {wanted}")
    if not entries:
        raise ValueError(f"{log} is empty: it has no whole entry yet; report the run after its first logged step")
    return entries, state, notes


def _first_whole(logs: list[Path]) -> tuple[Path, list[dict], dict, list[str]]:
    """The first log that can be read, with its content; an error of the last is the run's."""
    passed = []
    for log in logs[:-1]:
        try:
            entries, state, notes = read_entries(log)
        except ValueError as error:
            passed.append(f"A checkpoint is passed over. {error}")
        else:
            return log, entries, state, passed + notes
    entries, state, notes = read_entries(logs[-1])
    return logs[-1], entries, state, passed + notes


def flatten(settings: dict, prefix: str = "") -> dict[str, object]:
    """Nested settings as one level of `section.name`; what may be a secret is masked."""
    flat: dict[str, object] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{name}.")
        else:
            flat[name] = "(masked)" if isinstance(value, str) and _SECRET.search(str(key)) else value
    return flat


def find_trouble(run: Run, settings: dict) -> None:
    """What `grpo_ext.training.diagnosis` finds in a run's log, by the thresholds of its settings.

    Args:
        run: receives the findings, or a note why there are none.
        settings: as settings.json has them, with the trainer's under "training" or by themselves.
    """
    training = settings.get("training", settings)
    training = training if isinstance(training, dict) else {}
    try:
        from ..training.diagnosis import DiagnosisThresholds, diagnose  # late: it brings TRL along, which takes seconds

        thresholds = DiagnosisThresholds.of(training.get("diagnosis_thresholds"))
        run.findings = diagnose(run.entries, thresholds, training)
    except (ImportError, ValueError, TypeError, OverflowError) as error:  # settings may hold anything
        run.notes.append(f"The log was not searched for trouble. {_first_line(error)}")


def _beside(run: Run, name: str, read: Callable[[Path], object], default: object) -> object:
    """What `read` makes of a file in the run's folder; the default if it is not there, or malformed, with a note."""
    if not (run.folder / name).exists():
        return default
    try:
        return read(run.folder / name)
    except (ValueError, OSError) as error:
        run.notes.append(f"{name} is left out. {error}")
        return default


def _read_answers(run: Run, name: str) -> list[dict]:
    wanted = "not an answer (an object with 'problem' and 'completion')"
    answers, more = _beside(
        run, name, lambda path: read_lines(path, lambda e: "problem" in e and "completion" in e, wanted), ([], [])
    )
    run.notes += more
    return answers


def read_run(path: str | Path, label: str | None = None) -> Run:
    """Read a run. What is malformed beside its log is left out with a note.

    Args:
        path: its folder, its log, or a checkpoint or file with TRL's trainer state.
        label: its name on the page; `None`: the folder's.

    Raises:
        ValueError: the path is no run, or its log is malformed; names the file, and the line if it has lines.
        OSError: the log cannot be read.
    """
    log, entries, state, notes = _first_whole(find_logs(Path(path)))
    folder = log.resolve().parent
    folder = folder.parent if is_checkpoint(folder) else folder
    run = Run(label or folder.name, folder, log, entries, log.stat().st_mtime, notes=notes)

    settings = _beside(run, "settings.json", read_object, {})
    if settings:
        run.settings, run.settings_file = flatten(settings), "settings.json"
    elif state:
        run.settings = {name: state[name] for name in STATE_SETTINGS if name in state}
        run.settings_file = log.name
    run.summary = _beside(run, "summary.json", read_object, {})
    run.answers = pair_answers(*(_read_answers(run, f"greedy_{when}.jsonl") for when in ("before", "after")))
    names = {key.split("/")[1] for key in run.series() if re.fullmatch(r"rewards/[^/]+/mean", key)}
    run.sample, more = read_samples(folder / "completions", names, run.setting("reward_weights"))
    run.notes += more
    find_trouble(run, settings)
    return run


def read_runs(paths: list[str | Path]) -> list[Run]:
    """Read several runs, each under a label of its own.

    Raises:
        ValueError, OSError: as `read_run`, or a run is given twice.
    """
    logs = [find_logs(Path(path))[0].resolve() for path in paths]
    for index, log in enumerate(logs):
        if log in logs[:index]:
            raise ValueError(f"{paths[index]} is given twice (as {paths[logs.index(log)]}); name each run once")
    return [read_run(path, label) for path, label in zip(paths, _labels(paths, logs), strict=True)]


def _labels(paths: list[str | Path], logs: list[Path]) -> list[str]:
    """The shortest end of each run's path by which it is told from the others."""
    places = [Path(path).resolve() for path in paths]
    folders = [(place if place.is_dir() else place.parent).parts for place in places]

    def end(parts: tuple[str, ...], length: int) -> str:
        return "/".join(part for part in parts[-length:] if part != "/") or "/"

    labels = []
    for log, parts in zip(logs, folders, strict=True):
        length = 2 if is_checkpoint(Path(*parts)) else 1
        while length < len(parts) and sum(end(other, length) == end(parts, length) for other in folders) > 1:
            length += 1
        alone = folders.count(parts) == 1
        labels.append(end(parts, length) if alone else f"{end(parts, length)}/{log.name}")
    return labels
