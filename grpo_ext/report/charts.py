"""Line charts as inline SVG: axes with labels and ticks, every point with its value, no script needed."""

import math
from itertools import accumulate, pairwise
from typing import NamedTuple

from .markup import escape, line_class, number_text

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 70, 12, 10, 38
MOST_POINTS = 160  # of a line; a longer one keeps the lowest and highest of each stretch
SHOW_POINTS = 40  # up to so many are drawn as dots
SMOOTH_SHARE = 0.1  # of a noisy line's points are averaged in its thick line


class Line(NamedTuple):
    """One run's values of one key."""

    index: int  # of the run
    label: str
    points: dict[int, float]  # by step, in order; NaN and infinities are gaps


class Scale(NamedTuple):
    """From values to places along an axis."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def drawable(value: float) -> bool:
    """Whether a value has a place on an axis."""
    return math.isfinite(value) and abs(value) < 1e100


def value_range(values: list[float]) -> tuple[float, float]:
    """The ends of an axis: from 0 if the values reach down near it, else with a margin; never of no extent."""
    low, high = min(values), max(values)
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-90):
        room = 1.25 * size if size > 1e-80 else 1.0
        return (-room, 0.0) if high < 0 else (0.0, room)
    margin = 0.06 * (high - low)
    start = 0.0 if 0 <= low <= 0.5 * high else low - margin
    return start, high + margin


def ticks(low: float, high: float, count: int = 5, whole: bool = False) -> tuple[list[float], float]:
    """About `count` round numbers from `low` to `high`, and their distance; whole numbers if asked."""
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((power * m for m in (1, 2, 2.5, 5) if power * m >= rough * (1 - 1e-9)), power * 10)
    if whole:
        step = float(max(1, math.ceil(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)], step


def tick_text(value: float, step: float) -> str:
    """A tick's label, with as many digits as tell it from the next."""
    if value == 0:
        return "0"
    size = max(abs(value), step)
    if size >= 1e15 or step < 1e-5:
        return f"{value:.3g}"
    for limit, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if suffix == 'k' else limit):.6g}{suffix}"
    decimals = max(0, -math.floor(math.log10(step)))
    if round(step, decimals) != round(step, decimals + 1):  # 0.25
        decimals += 1
    return f"{value:.{decimals}f}"


def thin(points: list[tuple[int, float]], most: int = MOST_POINTS) -> list[tuple[int, float]]:
    """At most about `most` of the points, with the lowest and highest of each stretch, the first and the last."""
    if len(points) <= most:
        return points
    stretches = most // 2
    kept = {0, len(points) - 1}
    for i in range(stretches):
        stretch = range(i * len(points) // stretches, (i + 1) * len(points) // stretches)
        kept |= {min(stretch, key=lambda j: points[j][1]), max(stretch, key=lambda j: points[j][1])}
    return [points[i] for i in sorted(kept)]


def is_noisy(points: list[tuple[int, float]]) -> bool:
    """Whether a line is better read with its moving mean: many points that go up and down by more than its trend."""
    values = [value for _, value in points]
    way = sum(abs(b - a) for a, b in pairwise(values))
    return len(values) > SHOW_POINTS and way > 4 * (max(values) - min(values))


def moving_mean(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """The mean around each point, of `SMOOTH_SHARE` of all points; of fewer at the ends."""
    half = max(1, round(SMOOTH_SHARE * len(points) / 2))
    sums = [0.0, *accumulate(value for _, value in points)]
    means = []
    for i, (step, _) in enumerate(points):
        first, end = max(0, i - half), min(len(points), i + half + 1)
        means.append((step, (sums[end] - sums[first]) / (end - first)))
    return means


def segments(points: dict[int, float]) -> list[list[tuple[int, float]]]:
    """The points that can be drawn, cut where one cannot."""
    parts: list[list[tuple[int, float]]] = [[]]
    for step, value in points.items():
        if drawable(value):
            parts[-1].append((step, value))
        elif parts[-1]:
            parts.append([])
    return [part for part in parts if part]


def chart(title: str, unit: str, lines: list[Line]) -> str:
    """An SVG of the lines over the optimizer steps.

    Args:
        title: what is shown, for readers who cannot see it.
        unit: label of the vertical axis.
        lines: at least one, with at least one point.
    """
    steps = [step for line in lines for step in line.points]
    values = [value for line in lines for value in line.points.values() if drawable(value)]
    low, high = value_range(values or [0.0])
    first, last = min(steps), max(steps)
    x = Scale(first - 0.5 * (first == last), last + 0.5 * (first == last), LEFT, WIDTH - RIGHT)
    y = Scale(low, high, HEIGHT - BOTTOM, TOP)
    body = [_axes(x, y, unit), *(_line(line, x, y) for line in lines)]
    label = escape(f"{title}: {unit} over optimizer steps {first} to {last}")
    return f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(body)}</svg>'


def _axes(x: Scale, y: Scale, unit: str) -> str:
    marks, step = ticks(y.low, y.high)
    parts = []
    for value in marks:
        at = f"{y(value):.1f}"
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(
            f'<text class="tick" text-anchor="end" x="{LEFT - 5}" y="{at}" dy="4">{tick_text(value, step)}</text>'
        )
    bottom = HEIGHT - BOTTOM
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    marks, step = ticks(x.low, x.high, whole=True)
    for value in marks:
        at = f"{x(value):.1f}"
        parts.append(f'<line class="axis" x1="{at}" x2="{at}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(
            f'<text class="tick" text-anchor="middle" x="{at}" y="{bottom + 16}">{tick_text(value, step)}</text>'
        )
    across, middle = (LEFT + WIDTH - RIGHT) / 2, (TOP + bottom) / 2
    parts.append(f'<text class="label" text-anchor="middle" x="{across}" y="{HEIGHT - 5}">optimizer step</text>')
    parts.append(
        f'<text class="label" text-anchor="middle" transform="translate(13 {middle}) rotate(-90)">{escape(unit)}</text>'
    )
    return "".join(parts)


def _line(line: Line, x: Scale, y: Scale) -> str:
    parts = segments(line.points)
    drawn = sum(map(len, parts))
    shape = 'class="dot" r="2.6"' if drawn <= SHOW_POINTS else 'class="spot" r="4"'
    body = []
    for part in parts:
        kept = thin(part, max(4, MOST_POINTS * len(part) // drawn))
        at = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in kept]
        if is_noisy(part):
            mean = [(f"{x(step):.1f}", f"{y(value):.1f}") for step, value in thin(moving_mean(part))]
            body += [_polyline(at, "raw"), _polyline(mean, "mean")]
        elif len(kept) > 1:
            body.append(_polyline(at, "plain"))
        elif drawn > SHOW_POINTS:
            body.append(f'<circle class="dot" r="2.6" cx="{at[0][0]}" cy="{at[0][1]}"/>')
        body += [
            f'<circle {shape} cx="{cx}" cy="{cy}"><title>step {step}: {number_text(value)}</title></circle>'
            for (cx, cy), (step, value) in zip(at, kept, strict=True)
        ]
    bad = [(step, value) for step, value in line.points.items() if not drawable(value)]
    for step, value in _spread(bad):
        at = f"M{x(step) - 4:.1f} {TOP}l8 8m0 -8l-8 8"
        body.append(f'<path class="bad" d="{at}"><title>step {step}: {number_text(value)}</title></path>')
    return f'<g class="line {line_class(line.index)}" data-name="{escape(line.label)}">{"".join(body)}</g>'


def _polyline(places: list[tuple[str, str]], name: str) -> str:
    return f'<polyline class="{name}" points="{" ".join(",".join(place) for place in places)}"/>'


def _spread(bad: list[tuple[int, float]], most: int = 40) -> list[tuple[int, float]]:
    """At most `most` of the points without a place."""
    return bad if len(bad) <= most else [bad[i * (len(bad) - 1) // (most - 1)] for i in range(most)]
