"""Word problems in the manner of GSM8K, made up here: ten templates, small whole numbers, one or two steps.

GSM8K itself (Cobbe et al. 2021, https://arxiv.org/abs/2110.14168) needs a download and a model that reads it. These
problems need neither, and keep its shape: a question, a worked solution whose last line is `#### N`, and a reward that
N alone decides.
"""

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from datasets import Dataset

__all__ = ["TEMPLATES", "Problem", "Step", "Template", "iter_word_problems", "load_word_problems", "write_solution"]

Split = Literal["train", "test"]

NAMES = ("Anna", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Ines", "Jonas", "Kira", "Leo")
GOODS = ("apples", "books", "cards", "cups", "pens", "stamps", "toys", "shells")

# One in this many of a template's number tuples is held out for the test split.
TEST_EVERY = 8
# Draws allowed per problem asked for, before the split is called exhausted.
MAX_DRAWS_PER_PROBLEM = 100


class Step(NamedTuple):
    """One line of a worked solution, `left op right`, with whole numbers and `op` one of `+ - * /`."""

    left: int
    op: str
    right: int

    @property
    def result(self) -> int:
        match self.op:
            case "+":
                return self.left + self.right
            case "-":
                return self.left - self.right
            case "*":
                return self.left * self.right
            case "/":
                return self.left // self.right
        raise ValueError(f"unknown operation {self.op!r}; expected one of + - * /")

    def __str__(self) -> str:
        return f"{self.left}{self.op}{self.right}={self.result}"


class Problem(NamedTuple):
    """A question with the steps that answer it; `template` names where it came from."""

    template: str
    question: str
    steps: tuple[Step, ...]

    @property
    def answer(self) -> str:
        return str(self.steps[-1].result)

    @property
    def solution(self) -> str:
        return write_solution(self.steps)


class Template(NamedTuple):
    """A wording, the numbers it may hold, and the steps that solve it.

    `draw(rng)` gives the numbers in the order of the question; `solve(*numbers)` gives one or two steps with whole,
    positive results.
    """

    wording: str
    draw: Callable[[random.Random], tuple[int, ...]]
    solve: Callable[..., tuple[Step, ...]]


def _draw_shares(rng: random.Random) -> tuple[int, int]:
    # A total that divides evenly, and the number of people it is shared by.
    people = rng.randint(2, 9)
    return people * rng.randint(2, 9), people


def _draw_change(rng: random.Random) -> tuple[int, int, int]:
    # Enough money that some is left.
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    return count, price, count * price + rng.randint(1, 15)


def _draw_trip(rng: random.Random) -> tuple[int, int, int]:
    # A trip longer than its first two parts.
    morning, afternoon = rng.randint(5, 20), rng.randint(2, 15)
    return morning + afternoon + rng.randint(1, 20), morning, afternoon


TEMPLATES: dict[str, Template] = {
    "price": Template(
        "{name} buys {0} {goods} for {1} dollars each. How many dollars does {name} pay?",
        lambda rng: (rng.randint(2, 9), rng.randint(2, 9)),
        lambda count, price: (Step(count, "*", price),),
    ),
    "change": Template(
        "{name} buys {0} {goods} for {1} dollars each and pays with {2} dollars. "
        "How many dollars does {name} get back?",
        _draw_change,
        lambda count, price, paid: (Step(count, "*", price), Step(paid, "-", count * price)),
    ),
    "share": Template(
        "{0} {goods} are shared equally by {1} children. How many {goods} does each child get?",
        _draw_shares,
        lambda total, people: (Step(total, "/", people),),
    ),
    "share_and_find": Template(
        "{name} and some friends share {0} {goods} equally, {1} people in all. Then {name} finds {2} more. "
        "How many {goods} does {name} have?",
        lambda rng: (*_draw_shares(rng), rng.randint(2, 15)),
        lambda total, people, found: (Step(total, "/", people), Step(total // people, "+", found)),
    ),
    "younger": Template(
        "{name} is {0} years old. {other} is {1} years younger. How old is {other}?",
        lambda rng: (rng.randint(17, 40), rng.randint(2, 15)),
        lambda age, gap: (Step(age, "-", gap),),
    ),
    "age_later": Template(
        "{name} is {0} years old and {other} is {1} years older. How old will {other} be in {2} years?",
        lambda rng: (rng.randint(4, 30), rng.randint(2, 12), rng.randint(2, 12)),
        lambda age, gap, later: (Step(age, "+", gap), Step(age + gap, "+", later)),
    ),
    "walk": Template(
        "{name} walks {0} miles every day for {1} days, and {2} miles on the day after. How many miles is that in all?",
        lambda rng: (rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 15)),
        lambda daily, days, extra: (Step(daily, "*", days), Step(daily * days, "+", extra)),
    ),
    "trip": Template(
        "A trip is {0} miles long. {name} drives {1} miles in the morning and {2} miles after lunch. "
        "How many miles are left?",
        _draw_trip,
        lambda length, morning, afternoon: (Step(length, "-", morning), Step(length - morning, "-", afternoon)),
    ),
    "give_away": Template(
        "{name} has {0} {goods}, gets {1} more and gives {2} to {other}. How many {goods} does {name} have now?",
        lambda rng: (rng.randint(10, 30), rng.randint(2, 15), rng.randint(2, 9)),
        lambda have, more, given: (Step(have, "+", more), Step(have + more, "-", given)),
    ),
    "together": Template(
        "{name} has {0} {goods}. {other} has {1} times as many. How many {goods} do they have together?",
        lambda rng: (rng.randint(2, 12), rng.randint(2, 6)),
        lambda have, times: (Step(have, "*", times), Step(have * times, "+", have)),
    ),
}


def write_solution(steps: tuple[Step, ...]) -> str:
    """Write steps one a line, then the last result as `#### N`."""
    return "\n".join([*map(str, steps), f"#### {steps[-1].result}"])


def iter_word_problems(split: Split = "train", *, seed: int = 0) -> Iterator[Problem]:
    """Draw problems of one split without end, each template equally often in the long run; they repeat.

    The split is decided by the template and its numbers alone, whatever the seed: a test problem is never a train
    problem with other names.
    """
    if split not in ("train", "test"):
        raise ValueError(f"unknown split {split!r}; expected 'train' or 'test'")
    # A string seeds random.Random by its SHA-512, not by hash(), so that every process draws the same.
    rng = random.Random(f"word_problems/{split}/{seed}")
    names = list(TEMPLATES)
    while True:
        key = rng.choice(names)
        template = TEMPLATES[key]
        # Numbers of the other split are drawn again within the template, or templates would come up unequally often.
        numbers = template.draw(rng)
        while _is_held_out(key, numbers) != (split == "test"):
            numbers = template.draw(rng)
        name, other = rng.sample(NAMES, 2)
        question = template.wording.format(*numbers, name=name, other=other, goods=rng.choice(GOODS))
        yield Problem(key, question, template.solve(*numbers))


def load_word_problems(split: Split = "train", *, size: int | None = None, seed: int = 0) -> "Dataset":
    """Make a dataset of distinct word problems; the same arguments give the same rows on every machine.

    Args:
        split: "train" or "test"; no question is in both, whatever the sizes and seeds.
        size: Number of rows; by default 2000 for "train" and 200 for "test".
        seed: Which draw of the split.

    Returns:
        Columns `prompt` (a conversation of one user message), `question`, `answer` (the gold number as a string) and
        `solution` (worked steps, then `#### N`).

    Raises:
        ValueError: if the split is unknown, `size` is below 1, or the split has fewer distinct questions than `size`.
    """
    from datasets import Dataset

    if size is None:
        size = 200 if split == "test" else 2000
    if size < 1:
        raise ValueError(f"size={size} leaves no row; give a number from 1 up, or None for the split's default")
    problems: dict[str, Problem] = {}
    for draws, problem in enumerate(iter_word_problems(split, seed=seed)):
        if len(problems) == size:
            break
        if draws == MAX_DRAWS_PER_PROBLEM * size:
            raise ValueError(
                f"size={size}, but only {len(problems)} distinct {split} questions turned up; ask for fewer"
            )
        problems[problem.question] = problem
    return Dataset.from_list(
        [
            {
                "prompt": [{"role": "user", "content": problem.question}],
                "question": problem.question,
                "answer": problem.answer,
                "solution": problem.solution,
            }
            for problem in problems.values()
        ]
    )


def _is_held_out(template: str, numbers: tuple[int, ...]) -> bool:
    digest = hashlib.sha256(f"{template} {numbers}".encode()).digest()
    return int.from_bytes(digest[:4], "big") % TEST_EVERY == 0
