"""The section of curves: one chart for each number of the log, all runs on it, grouped."""

import math

from .charts import Line, chart, drawable
from .keys import grouped, meaning
from .markup import escape, number_text, run_tag, times
from .runs import Run

THICK_LINE = "Of a noisy curve the thick line is the moving mean over a tenth of its points."


def curves(runs: list[Run]) -> str:
    """Charts of what changed, and a table of what did not."""
    series = [run.series() for run in runs]
    keys = {key for found in series for key in found}
    still = {key for key in keys if _is_still([found[key] for found in series if key in found])}
    parts = []
    for heading, names in grouped(keys - still).items():
        if names:
            figures = "".join(_figure(key, runs, series) for key in names)
            parts.append(f"<h3>{escape(heading)}</h3>" * bool(heading) + f'<div class="charts">{figures}</div>')
    if 'class="mean"' in "".join(parts):
        parts.insert(0, f"<p><small>{THICK_LINE}</small></p>")
    if not parts:
        parts.append("<p>No number of the log can be drawn yet.</p>")
    if still:
        parts.append(_still_table([key for names in grouped(still).values() for key in names], runs, series))
    return "".join(parts)


def _is_still(found: list[dict[int, float]]) -> bool:
    """Whether a chart would show nothing: one value, or one point a run."""
    return len({str(value) for points in found for value in points.values()}) == 1 or all(len(p) == 1 for p in found)


def _figure(key: str, runs: list[Run], series: list[dict]) -> str:
    title, unit = meaning(key)
    lines = [
        Line(index, run.label, found[key])
        for index, (run, found) in enumerate(zip(runs, series, strict=True))
        if key in found
    ]
    name = f"<code>{escape(key)}</code>" if title != key else ""
    said = "".join(f'<li class="r{line.index}">{_said(line, len(runs) > 1)}</li>' for line in lines)
    return (
        f"<figure><h4>{escape(title)} {name}</h4>{chart(title, unit, lines)}"
        f'<figcaption><ul class="plain">{said}</ul></figcaption></figure>'
    )


def _said(line: Line, many: bool) -> str:
    """A line in words: its last value and its range."""
    *_, last = line.points
    values = [value for value in line.points.values() if drawable(value)]
    text = f"{number_text(line.points[last])} at step {last:,}"
    if len(values) > 1:
        text += f"; range {number_text(min(values))} to {number_text(max(values))}"
    bad = [step for step, value in line.points.items() if not math.isfinite(value)]
    if bad:
        text += f'; <strong class="bad">{times(len(bad), "value")} not finite, first at step {bad[0]:,}</strong>'
    return run_tag(line.index, line.label, many) + text


def _still_table(keys: list[str], runs: list[Run], series: list[dict]) -> str:
    rows = []
    for key in keys:
        cells = "".join(
            f'<td class="r{index}">{_still_text(found.get(key))}</td>' for index, found in enumerate(series)
        )
        rows.append(f"<tr><th><code>{escape(key)}</code></th>{cells}</tr>")
    head = "".join(f'<th class="r{index}">{escape(run.label)}</th>' for index, run in enumerate(runs))
    return (
        f"<details{' open' * (len(keys) <= 12)}><summary>Numbers that did not change, or were logged once "
        f'({len(keys)})</summary><div class="wide"><table><thead><tr><th>number</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _still_text(points: dict[int, float] | None) -> str:
    if not points:
        return "–"
    (step, value), *others = points.items()
    where = f"at {times(len(points), 'step')}" if others else f"at step {step:,}"
    return f"{number_text(value)} <small>{where}</small>"
