"""Text and numbers as HTML: whatever a model wrote is shown, never obeyed."""

import html
import json
import math
import re

COLOURS = 8  # of lines in the style sheet; further runs have them again, dashed

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def escape(text: object) -> str:
    """As text inside an element or a quoted attribute; control characters and lone surrogates become U+FFFD."""
    return html.escape(_CONTROL.sub("\ufffd", str(text).replace("\r\n", "\n")), quote=True)


def number_text(value: float | None, signed: bool = False) -> str:
    """Four digits, or all before the point with separators; a dash for none."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    sign = "+" if signed and value > 0 else ""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{sign}{int(value):,}"
    return f"{sign}{value:,.0f}" if 1e3 <= abs(value) < 1e15 else f"{sign}{value:.4g}"


def value_text(value: object, longest: int = 2000) -> str:
    """A setting as it stands in JSON, strings without quotes."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= longest else text[:longest] + " ..."


def times(count: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def line_class(index: int) -> str:
    """The classes that give run number `index` its colour and dashes, and let it be hidden."""
    return f"r{index} c{index % COLOURS}" + (" dashed" if index >= COLOURS else "")


def run_tag(index: int, label: str, many: bool) -> str:
    """A run's name behind its colour; nothing if it is the only one of the page."""
    return f'<span class="run {line_class(index)}"><i></i>{escape(label)}</span> ' if many else ""
