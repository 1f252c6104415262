"""What the model wrote: logged completions with their reward and advantage, and greedy answers before and after."""

import json
import math
import re
from pathlib import Path
from typing import NamedTuple

MOST_STEPS = 16  # logged steps that completions are taken from
PER_RUN = 96  # completions of a run on the page, at most about
LONGEST = 8000  # characters of a text
OTHERS_LONGEST = 400  # characters of a value in a further column


class Completion(NamedTuple):
    """One logged completion."""

    step: int
    prompt: str
    text: str
    reward: float | None  # the weighted sum of the reward functions', as TRL forms it
    advantage: float | None
    parts: dict[str, float | None]  # the reward functions' own
    others: dict[str, str]  # further columns


class Sample(NamedTuple):
    """The completions shown, and out of how many they were chosen."""

    completions: list[Completion]
    seen: int  # completions of the steps read
    steps_read: int
    steps_logged: int


class Answer(NamedTuple):
    """Greedy answers to one problem; `None`: not measured."""

    problem: str
    before: str | None
    after: str | None
    others: dict[str, str]  # what else the two files say about it


def plain_text(value: object) -> str:
    """A prompt or completion as text: one message as its content, several each under its role."""
    if isinstance(value, str):
        return value
    if value is None:
        return ""
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        return json.dumps(value, default=str, ensure_ascii=False)
    contents = [_content(message) for message in value]
    if len(contents) == 1:
        return contents[0]
    roles = [message.get("role") or "?" for message in value]
    return "\n\n".join(f"[{role}]\n{content}" for role, content in zip(roles, contents, strict=True))


def _content(message: dict) -> str:
    content = message.get("content")
    if isinstance(content, list):  # text and images
        content = "\n".join(
            (part.get("text") or f"[{part.get('type', '?')}]") if isinstance(part, dict) else str(part)
            for part in content
        )
    calls = message.get("tool_calls")
    called = json.dumps(calls, default=str, ensure_ascii=False) if calls else ""
    return "\n".join(str(text) for text in (content, called) if text)


def shorten(text: str, longest: int = LONGEST) -> str:
    """The text without its middle if it is long: an answer stands at its end."""
    if len(text) <= longest:
        return text
    head, tail = longest * 3 // 4, longest // 4
    return f"{text[:head]}\n[... {len(text) - head - tail:,} characters left out ...]\n{text[-tail:]}"


def _number(value: object) -> float | None:
    """A column's value; of an advantage per token the mean; NaN (a reward function that said nothing) is none."""
    if isinstance(value, list):
        known = [number for number in map(_number, value) if number is not None]
        return sum(known) / len(known) if known else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value):
        return None
    return float(value)


def read_samples(folder: Path, names: set[str], weights: object = None) -> tuple[Sample | None, list[str]]:
    """The completions with the highest and lowest reward and advantage, of steps spread over the run.

    Args:
        folder: of `completions_*.parquet`, as TRL's `log_completions` writes them.
        names: of the reward functions; empty: every column of numbers counts as one.
        weights: of the reward functions in the order of the columns; anything but a list that fits: all 1.

    Returns:
        The sample (`None` without a file that can be read), and notes on those that cannot.
    """
    files = sorted(folder.glob("completions_*.parquet"), key=lambda path: (_file_step(path), path.name))
    if not files:
        return None, []
    from pyarrow import ArrowException  # of the only package needed here; imported late, it takes a while
    from pyarrow.parquet import ParquetFile

    chosen = sorted({round(i * (len(files) - 1) / max(1, MOST_STEPS - 1)) for i in range(MOST_STEPS)})
    chosen = list(range(len(files))) if len(files) <= MOST_STEPS else chosen
    ends = max(1, PER_RUN // (4 * len(chosen)))
    completions, seen, read, notes = [], 0, 0, []
    for index in chosen:
        try:
            with ParquetFile(files[index]) as file:
                rows = file.read().to_pylist()
        except (ArrowException, OSError) as error:
            reason = str(error).split("\n")[0]
            notes.append(f"completions/{files[index].name} is left out: it cannot be read as parquet ({reason})")
            continue
        if rows and "completion" not in rows[0]:
            notes.append(f"completions/{files[index].name} is left out: it has no column 'completion', as TRL's has")
            continue
        seen, read = seen + len(rows), read + 1
        completions += _extremes([_completion(row, names, weights, _file_step(files[index])) for row in rows], ends)
    return (Sample(completions, seen, read, len(files)) if read else None), notes


def _file_step(path: Path) -> int:
    found = re.search(r"_(\d{1,15})\.parquet$", path.name)
    return int(found[1]) if found else 0


def _completion(row: dict, names: set[str], weights: object, step: int) -> Completion:
    others = {key: value for key, value in row.items() if key not in ("step", "prompt", "completion", "advantage")}
    is_reward = (lambda key: key in names) if names else (lambda key: isinstance(others[key], (int, float)))
    parts = {key: _number(others[key]) for key in others if is_reward(key)}
    if not isinstance(weights, list) or len(weights) != len(parts):
        weights = [1.0] * len(parts)
    known = [w * part for w, part in zip(weights, parts.values(), strict=True) if part is not None]
    return Completion(
        step=row["step"] if isinstance(row.get("step"), int) else step,
        prompt=shorten(plain_text(row.get("prompt"))),
        text=shorten(plain_text(row["completion"])),
        reward=sum(known) if known else None,
        advantage=_number(row.get("advantage")),
        parts=parts,
        others={key: shorten(plain_text(value), OTHERS_LONGEST) for key, value in others.items() if key not in parts},
    )


def _extremes(completions: list[Completion], ends: int) -> list[Completion]:
    """The `ends` highest and lowest of a step, by reward and by advantage; each once, in the order logged."""
    kept: set[int] = set()
    for first, second in (("reward", "advantage"), ("advantage", "reward")):
        known = [i for i, completion in enumerate(completions) if getattr(completion, first) is not None]
        known.sort(key=lambda i: (getattr(completions[i], first), getattr(completions[i], second) or 0.0))
        kept.update(known[:ends], known[-ends:])
    if not kept:
        kept.update(range(min(len(completions), 4 * ends)))
    return [completions[i] for i in sorted(kept)]


def pair_answers(before: list[dict], after: list[dict]) -> list[Answer]:
    """Greedy answers by problem: those that changed first, then those that did not, then those with one answer."""
    texts: dict[str, dict[str, dict]] = {}
    for when, entries in (("before", before), ("after", after)):
        for entry in entries:
            texts.setdefault(str(entry["problem"]), {})[when] = entry
    answers = []
    for problem, found in texts.items():
        text = {when: shorten(plain_text(entry["completion"])) for when, entry in found.items()}
        others = {
            f"{key} ({when})": shorten(plain_text(value), OTHERS_LONGEST)
            for when, entry in found.items()
            for key, value in entry.items()
            if key not in ("problem", "completion")
        }
        answers.append(Answer(problem, text.get("before"), text.get("after"), others))
    return sorted(answers, key=lambda a: 2 if None in (a.before, a.after) else int(a.before == a.after))
