"""Rewards for tasks whose answer is one number: what the completion ends on, against the gold.

| reward   | what counts as the answer                                   | compared as                      |
|----------|-------------------------------------------------------------|----------------------------------|
| strict   | the last `#### N` of the last 300 characters                | text, commas removed             |
| flexible | the last run of digits, dots and commas of the last 300     | text, as it stands               |
| robust   | `final_answer`: last `#### N`, else `\\boxed{N}`, else last N | number, by math-verify           |

`strict` and `flexible` give the numbers of verl 0.9.1's `verl.utils.reward_score.gsm8k.compute_score`, quirks
included: to `strict`, `#### $18` and `#### 18.` are wrong; to `flexible`, so are `18.` and `70,000`. `robust` pays
those, and is the one to choose unless a run is being compared with verl.
"""

import logging
import math
import re
from collections import deque
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import Any

__all__ = [
    "REWARDS",
    "completion_text",
    "final_answer",
    "flexible_reward",
    "flexible_score",
    "gold_number",
    "robust_reward",
    "robust_score",
    "strict_reward",
    "strict_score",
]

# verl looks at this many characters from the end, so an answer followed by more text than that is unseen.
_TAIL = 300
_STRICT = re.compile(r"#### (-?[0-9.,]+)")
_FLEXIBLE = re.compile(r"-?[0-9.,]+")

# No gold of this kind of task has more characters; beyond it lie only attempts to make the comparison slow.
_MAX_NUMBER = 40
_CURRENCY = "$€£¥₹"
# True minus, hyphens, en dash, small and full-width minus. Not the em dash, which joins clauses.
_MINUS = str.maketrans(dict.fromkeys("\u2212\u2010\u2011\u2013\ufe63\uff0d", "-"))

_SPACE = "[ \u00a0\u202f\u2009]"
_DIGITS = rf"(?:(?:[0-9]{{1,3}}(?:{_SPACE}[0-9]{{3}})+(?![0-9])|[0-9]+(?:,[0-9]+)*)(?:\.[0-9]+)*|(?:\.[0-9]+)+)"
_NUMBER = rf"(?:-[{_CURRENCY}]?|[{_CURRENCY}]-?)?{_DIGITS}(?:[eE][+-]?[0-9]+)?(?: ?%)?"
# An operator, a clock or ratio colon, or the gap of a mixed number (`3 1/2`): what makes two numbers one expression.
_OPERATOR = r"(?:[ \t]*(?:\*\*|[-+*/×÷·^xX]|:(?=[0-9]))[ \t({]*| (?=[0-9]+/[0-9]))"
# Not inside a word, so that `H2O` and `x2` hold no number and the hyphen of `day-18` is no sign.
_RUN = re.compile(rf"(?<![^\W_]){_NUMBER}(?:{_OPERATOR}{_NUMBER})*")
_ONE_NUMBER = re.compile(_NUMBER)
_FRACTION = re.compile(r"(-?)([0-9]+) ?/ ?([0-9]+)")
_EQUALS = re.compile(r"[ \t$})*]*=[ \t({]*")
_LEAD = re.compile(r"(?:the )?(?:final )?answer(?: is)?|[^=\n0-9]{1,30}=", re.IGNORECASE)

_GROUPED = re.compile(r"[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}")
_GOLD = re.compile(rf"(-?)\$?((?:[0-9]+|{_GROUPED.pattern})(?:\.[0-9]+)?|\.[0-9]+)")

# LaTeX whose value is not the digits it shows.
_SYMBOLIC = re.compile(r"\\(?:sqrt|pi|pm|log|ln|binom)(?![a-zA-Z])")
_LATEX = [
    (re.compile(r"(?<=[0-9])\s*\\[cdt]?frac"), r"+\\frac"),  # a mixed number is a sum, not longer digits
    (re.compile(r"\\[cdt]?frac\s*\{\s*([0-9]+)\s*\}\s*\{\s*([0-9]+)\s*\}"), r"\1/\2"),
    (re.compile(r"\\[cdt]?frac\s*([0-9])\s*([0-9])"), r"\1/\2"),
    (re.compile(r"\\(?:times|cdot|div)(?![a-zA-Z])"), "*"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\\[,;:!]"), ""),
    (re.compile(r"\\([$%])"), r"\1"),
    (re.compile(r"\\[a-zA-Z]+"), ""),
]


def gold_number(answer: Any) -> str | None:
    """The gold number of an answer, commas removed, or None where there is none.

    `answer` is the number itself ("70,000", 18) or a worked solution that ends `#### N`. A dollar sign and a Unicode
    minus are accepted; text beside the number, a fraction, or anything that is neither `str` nor `int` is no gold.
    Digits are otherwise kept as they stand ("18.50"), because verl's rules compare text.
    """
    if isinstance(answer, int) and not isinstance(answer, bool):
        answer = str(answer)
    if not isinstance(answer, str):
        return None
    number = answer.rpartition("####")[2].translate(_MINUS).strip()
    found = _GOLD.fullmatch(number) if len(number) <= _MAX_NUMBER else None
    return None if found is None else "".join(found.groups()).replace(",", "")


def strict_score(text: str, gold: str) -> float:
    """1.0 where the last `#### N` of the last 300 characters of `text` is `gold`, else 0.0.

    Exactly one space after the hashes; commas are dropped from N and the rest is compared as text. `text` that is not
    a string scores 0.0. Source: verl 0.9.1 `gsm8k.compute_score(method="strict")`.
    """
    found = _STRICT.findall(text[-_TAIL:]) if isinstance(text, str) else []
    return float(bool(found) and found[-1].replace(",", "") == gold)


def flexible_score(text: str, gold: str) -> float:
    """1.0 where the last run of digits, dots and commas in the last 300 characters of `text` is `gold`, else 0.0.

    A run that is one dot is passed over; nothing is stripped from the one that is kept, so `18.` is not "18". `text`
    that is not a string scores 0.0. Source: verl 0.9.1 `gsm8k.compute_score(method="flexible")`.
    """
    found = _FLEXIBLE.findall(text[-_TAIL:]) if isinstance(text, str) else []
    # Where every run is a dot, verl keeps the dot as the answer.
    return float(bool(found) and next((run for run in reversed(found) if run != "."), ".") == gold)


def robust_score(text: str, gold: str) -> float:
    """1.0 where the number that `text` ends on equals `gold` as a number, else 0.0.

    `final_answer(text)` is compared with `gold_number(gold)` by math-verify (6 decimals), so `18`, `18.0`, `$18.` and
    `\\boxed{18}` are one answer. Only a plain number reaches math-verify, never the model's own LaTeX: parsing that may
    take for ever, and a timeout would need signals, which work in the main thread only. Never raises on any `text` or
    `gold`; what cannot be read scores 0.0. Raises ImportError where math-verify is not installed.
    """
    target, found = gold_number(gold), final_answer(text)
    if target is None or found is None:
        return 0.0
    parse, verify = _math_verify()
    try:
        return float(verify(parse(target), parse(found)))
    except Exception:
        return 0.0


def final_answer(text: str) -> str | None:
    r"""The number a completion ends on, as plain text ("-5", "70000", "18.5", "1/2"), or None.

    Precedence:
    1. What follows the last `####`, on that line or the next, if it starts with a number; currency, markup and "the
       answer is" may stand before it, any text after it. A heading such as `#### Step 2` does not count.
    2. The content of the last `\boxed{}` that is closed: its first number.
    3. The last number in the text.

    Of a chain `3 * 6 = 18` the last link counts. Units are ignored, and a percent sign is one: `18%` is "18". A number
    is an integer, a decimal or a fraction in lowest terms. Arithmetic left undone (`3 * 6`, `36/2`), a range (`18-20`),
    a clock time, a list (`18,19`), a mixed number or a root is none, and a lower rule is then not tried: the model did
    say something else. Linear in the length of `text`; text that is not a string gives None.
    """
    if not isinstance(text, str):
        return None
    text = text.translate(_MINUS)
    _, hashes, after = text.rpartition("####")
    if hashes:
        span = after.lstrip().partition("\n")[0]
        plain = _strip_latex(span).lstrip(" \t*_`\"'~≈:=({[" + _CURRENCY)
        lead = _LEAD.match(plain)
        if lead:
            plain = plain[lead.end() :].lstrip(" \t*_`\"'~≈:=({[" + _CURRENCY)
        # After the hashes a minus apart from its number is a sign, not a bullet.
        plain = re.sub(r"^-[ \t]+", "-", plain)
        if _RUN.match(plain) or _SYMBOLIC.match(span):
            return None if _SYMBOLIC.search(span) else _first_number(plain)
    boxed = _last_boxed(text)
    if boxed is not None:
        return None if _SYMBOLIC.search(boxed) else _first_number(_strip_latex(boxed))
    last = deque(_RUN.finditer(_strip_latex(text)), maxlen=1)
    return _plain_number(last[0].group()) if last else None


def strict_reward(prompts: Sequence, completions: Sequence, answer: Sequence, **kwargs: Any) -> list[float | None]:
    """`strict_score` of every completion, as a TRL reward function; None where the gold is not a number.

    Completions are strings or lists of messages, `answer` is the data set's gold column. Raises ValueError where the
    two differ in length.
    """
    return _rewards(strict_score, completions, answer)


def flexible_reward(prompts: Sequence, completions: Sequence, answer: Sequence, **kwargs: Any) -> list[float | None]:
    """`flexible_score` of every completion, as a TRL reward function; None where the gold is not a number.

    Completions are strings or lists of messages, `answer` is the data set's gold column. Raises ValueError where the
    two differ in length.
    """
    return _rewards(flexible_score, completions, answer)


def robust_reward(prompts: Sequence, completions: Sequence, answer: Sequence, **kwargs: Any) -> list[float | None]:
    """`robust_score` of every completion, as a TRL reward function; None where the gold is not a number.

    Completions are strings or lists of messages, `answer` is the data set's gold column. Raises ValueError where the
    two differ in length, and ImportError where math-verify is not installed.
    """
    return _rewards(robust_score, completions, answer)


REWARDS: dict[str, Callable[..., list[float | None]]] = {
    "strict": strict_reward,
    "flexible": flexible_reward,
    "robust": robust_reward,
}


def completion_text(completion: Any) -> str:
    """The text of a completion: a string itself, or the content of its last assistant message.

    A list without an assistant message gives its last message; a content made of parts gives their texts joined.
    Missing or None content gives "".
    """
    if isinstance(completion, str):
        return completion
    messages = completion if isinstance(completion, (list, tuple)) else [completion]
    messages = [message for message in messages if isinstance(message, dict)]
    spoken = [message for message in messages if message.get("role") == "assistant"] or messages
    content = spoken[-1].get("content") if spoken else None
    if isinstance(content, (list, tuple)):
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str))
    return content if isinstance(content, str) else ""


def _rewards(score: Callable[[str, str], float], completions: Sequence, answer: Sequence) -> list[float | None]:
    if len(completions) != len(answer):
        raise ValueError(
            f"{len(completions)} completions but {len(answer)} answers: give one gold for each completion."
        )
    golds = [gold_number(gold) for gold in answer]
    # None is TRL's "not scored by this function": such a row is neither paid nor punished.
    return [None if g is None else score(completion_text(c), g) for c, g in zip(completions, golds, strict=True)]


def _strip_latex(text: str) -> str:
    """LaTeX reduced to the numbers and operators it shows; other commands go, their arguments stay."""
    for pattern, plain in _LATEX:
        text = pattern.sub(plain, text)
    return text


def _last_boxed(text: str) -> str | None:
    r"""The content of the last closed `\boxed{...}`, braces balanced; None where there is none."""
    end = len(text)
    while (start := text.rfind("\\boxed{", 0, end)) >= 0:
        depth = 0
        # Up to the `\boxed` tried before: whatever lies beyond left this one unclosed too, and the scan stays linear.
        for i in range(start + 6, end):
            depth += (text[i] == "{") - (text[i] == "}")
            if depth == 0:
                return text[start + 7 : i]
        end = start
    return None


def _first_number(text: str) -> str | None:
    """The first number of `text`, or the last link of the chain `a = b = ...` that starts there."""
    run = _RUN.search(text)
    while run:
        equals = _EQUALS.match(text, run.end())
        link = _RUN.match(text, equals.end()) if equals else None
        if link is None:
            return _plain_number(run.group())
        run = link
    return None


def _plain_number(run: str) -> str | None:
    """A run as a plain number without grouping, unit or exponent; None where it is an expression or too long."""
    if len(run) > _MAX_NUMBER:
        return None
    fraction = _FRACTION.fullmatch(run)
    if fraction:
        sign, top, bottom = fraction.groups()
        # 36/2 is a division left undone; 1/2 is how the number is written.
        in_lowest_terms = int(bottom) > 1 and math.gcd(int(top), int(bottom)) == 1
        return f"{sign}{int(top)}/{int(bottom)}" if in_lowest_terms else None
    if _ONE_NUMBER.fullmatch(run) is None:
        return None
    number = re.sub(rf"[{_CURRENCY}%\s]", "", run)
    whole, _, exponent = number.lower().partition("e")
    integer = whole.lstrip("-").partition(".")[0]
    if whole.count(".") > 1 or ("," in integer and not _GROUPED.fullmatch(integer)):
        return None
    if exponent and abs(int(exponent)) > _MAX_NUMBER:
        return None
    return format(Decimal(number.replace(",", "")), "f")


@lru_cache(maxsize=1)
def _math_verify() -> tuple[Callable, Callable]:
    """math-verify's `parse` and `verify` for plain numbers, without timeouts, whose signals need the main thread."""
    import math_verify

    # It warns once that timeouts are off; a plain number needs none, so that one line, and no other, is dropped.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).addFilter(lambda record: "Timeout is disabled" not in record.getMessage())
    config = [math_verify.ExprExtractionConfig()]

    def parse(number: str) -> list:
        return math_verify.parse(number, config, fallback_mode="no_fallback", parsing_timeout=None)

    def verify(gold: list, found: list) -> bool:
        return math_verify.verify(gold, found, timeout_seconds=None)

    return parse, verify
