"""GSM8K as a data set of prompts: read, checked row by row, and worded as verl's example words it."""

import json
import random
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from .rewards import gold_number

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["INSTRUCTION", "GSM8KRows", "load_gsm8k", "read_gsm8k"]

# The wording of verl's GSM8K example; the strict reward pays the form it asks for.
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SHOWN = 5


class GSM8KRows(NamedTuple):
    """What `read_gsm8k` found.

    `rows`: dicts with `question`, `solution` (the worked answer as it stands) and `answer` (its gold number, commas
    removed).
    `skipped`: the line numbers, from 1, of rows without a readable gold.
    """

    rows: list[dict[str, str]]
    skipped: list[int]


def load_gsm8k(
    path_or_id: str | Path = "openai/gsm8k",
    split: str = "train",
    *,
    limit: int | None = None,
    seed: int | None = None,
    system_prompt: str | None = None,
    instruction: str = INSTRUCTION,
) -> "Dataset":
    """GSM8K with the columns `prompt`, `answer`, `question` and `solution`.

    `prompt` is a list of messages: the system prompt if there is one, then the user's `question + " " + instruction`
    (the question alone where `instruction` is empty). `answer` is the gold number as text, the column the rewards read;
    `solution` is the worked answer. `seed` shuffles the rows, None keeps their order; then the first `limit` are taken,
    None takes all.

    Rows whose gold is not a number are left out, with a UserWarning that counts them; `read_gsm8k` gives their lines.
    Raises what `read_gsm8k` raises, and ValueError where `limit` is below 1.
    """
    from datasets import Dataset

    if limit is not None and limit < 1:
        raise ValueError(f"limit={limit} leaves no row: give a number from 1 up, or None for all rows.")
    rows, skipped = read_gsm8k(path_or_id, split)
    if skipped:
        shown = ", ".join(map(str, skipped[:_SHOWN])) + (", ..." if len(skipped) > _SHOWN else "")
        warnings.warn(
            f"{path_or_id} ({split}): {len(skipped)} of {len(rows) + len(skipped)} rows have no gold number after "
            f"'####' and are left out (lines {shown}).",
            stacklevel=2,
        )
    if seed is not None:
        random.Random(seed).shuffle(rows)
    head = [{"role": "system", "content": system_prompt}] if system_prompt else []

    def prompt(question: str) -> list[dict[str, str]]:
        return [*head, {"role": "user", "content": f"{question} {instruction}" if instruction else question}]

    rows = rows[:limit]
    return Dataset.from_dict(
        {
            "prompt": [prompt(row["question"]) for row in rows],
            "answer": [row["answer"] for row in rows],
            "question": [row["question"] for row in rows],
            "solution": [row["solution"] for row in rows],
        }
    )


def read_gsm8k(path_or_id: str | Path = "openai/gsm8k", split: str = "train") -> GSM8KRows:
    """The rows of one split that have a gold number, and the line numbers of those that have none.

    `path_or_id` is a folder that holds `{split}.jsonl` (an object with the strings `question` and `answer` on each
    line, blank lines ignored) or a Hub id, read with the configuration "main". A gold is the number after the last
    `####` of `answer`.

    Raises FileNotFoundError where the folder, the file or the Hub data set cannot be had, and ValueError, with file and
    line, where a line is not such an object, or where no row is left.
    """
    folder = Path(path_or_id).expanduser()
    source = str(path_or_id)
    if folder.is_dir():
        source = str(folder / f"{split}.jsonl")
        numbered = _read_jsonl(folder, split)
    elif folder.exists() or not _HUB_ID.fullmatch(source):
        problem = "is a file" if folder.exists() else "does not exist"
        raise FileNotFoundError(
            f"{source} {problem}: give a folder that holds {split}.jsonl, or a Hub id such as 'openai/gsm8k'."
        )
    else:
        numbered = _read_hub(source, split)

    rows, skipped = [], []
    for line, row in numbered:
        question, solution = (_text(row, key, source, line) for key in ("question", "answer"))
        answer = gold_number(solution) if "####" in solution else None
        if answer is None:
            skipped.append(line)
        else:
            rows.append({"question": question, "solution": solution, "answer": answer})
    if not rows:
        what = f"none of its {len(skipped)} rows ends in '#### N'" if skipped else "it has no rows"
        raise ValueError(f"{source}: {what}; each row needs a 'question' and an 'answer' that ends in '#### N'.")
    return GSM8KRows(rows, skipped)


def _read_jsonl(folder: Path, split: str) -> Iterator[tuple[int, Any]]:
    path = folder / f"{split}.jsonl"
    if not path.is_file():
        present = ", ".join(sorted(p.name for p in folder.glob("*.jsonl"))) or "none"
        raise FileNotFoundError(
            f"{path} does not exist (jsonl files in {folder}: {present}): put the {split} split there or name another "
            "split."
        )
    # Lines are cut from bytes: one that is not UTF-8 is then named by its number too.
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            try:
                yield line, json.loads(raw.decode("utf-8-sig"))
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {line}: not a JSON object in UTF-8 ({error}).") from error


def _read_hub(hub_id: str, split: str) -> Iterator[tuple[int, Any]]:
    import datasets

    try:
        dataset = datasets.load_dataset(hub_id, "main", split=split)
    except Exception as error:  # no network, no such id, no such split: the remedy is one
        raise FileNotFoundError(
            f"{hub_id}: no such folder, and the Hub gave no data set with configuration 'main' and split {split!r} "
            f"({type(error).__name__}: {error}). Check the name and the network, or give a folder that holds "
            f"{split}.jsonl."
        ) from error
    return enumerate(dataset, start=1)


def _text(row: Any, key: str, source: str, line: int) -> str:
    value = row.get(key) if isinstance(row, dict) else None
    if isinstance(value, str):
        return value
    if not isinstance(row, dict):
        problem = f"expected an object, got {type(row).__name__}"
    elif key not in row:
        problem = f"no key {key!r} (keys: {', '.join(row) or 'none'})"
    else:
        problem = f"{key!r} must be a string, got {type(value).__name__}"
    raise ValueError(f"{source}, line {line}: {problem}.")
