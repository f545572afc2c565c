"""A small line chart as SVG text: no plotting library, no fonts to load, readable on light and dark
pages.

The x axis is in powers of two; the y axis begins at zero, or is logarithmic. Knows numbers and
labels, and nothing of what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#2f81d6", "#d9762b", "#3f9e5a", "#a265c9")
GREY = "#808080"  # text and axes: enough contrast on white and on black
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 370, 72, 20, 78, 52


@dataclass(frozen=True)
class Chart:
    """Lines over common x values, powers of two. A line may end early: it has fewer values than
    there are x values. There are at most four lines."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    xs: Sequence[int]
    lines: Mapping[str, Sequence[float]]
    log_y: bool = False


def svg(chart: Chart) -> str:
    """The chart as one SVG document."""
    ticks = log_ticks(*_range(chart)) if chart.log_y else linear_ticks(_range(chart)[1])
    middle, height = (LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 16 {height:.0f})"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="12" fill="{GREY}">',
        _text(LEFT, 20, chart.title, 'font-size="15" font-weight="bold"'),
        _text(LEFT, 38, chart.subtitle),
        _text(middle, HEIGHT - 12, chart.x_label, 'text-anchor="middle"'),
        _text(16, height, chart.y_label, turned),
        _legend(list(chart.lines)),
    ]
    for tick in ticks:
        y = _y(tick, ticks, chart.log_y)
        ends = f'x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"'
        parts.append(f'<line {ends} stroke="{GREY}" stroke-opacity="0.3"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tick:,g}", 'text-anchor="end"'))
    for x in chart.xs:
        parts.append(_text(_x(x, chart.xs), HEIGHT - BOTTOM + 18, f"{x:,}", 'text-anchor="middle"'))
    for colour, values in zip(COLOURS, chart.lines.values(), strict=False):
        at = [_x(x, chart.xs) for x in chart.xs]
        points = [(x, _y(v, ticks, chart.log_y)) for x, v in zip(at, values, strict=False)]
        parts += _line(colour, points)
    return "\n".join([*parts, "</svg>"]) + "\n"


def linear_ticks(highest: float) -> list[float]:
    """0 and four to eight round numbers, the last at or above the highest value."""
    rough = highest / 4
    scale = 10.0 ** math.floor(math.log10(rough))
    step = max(s * scale for s in (1, 2, 2.5, 5) if s * scale <= rough * 1.0001)
    return [round(i * step, 10) for i in range(math.ceil(highest / step - 1e-9) + 1)]


def log_ticks(lowest: float, highest: float) -> list[float]:
    """1, 2, 5, 10, ... around the values."""
    powers = range(math.floor(math.log10(lowest)) - 1, math.ceil(math.log10(highest)) + 1)
    every = [m * 10.0**e for e in powers for m in (1, 2, 5)]
    low, high = max(t for t in every if t <= lowest), min(t for t in every if t >= highest)
    return [t for t in every if low <= t <= high]


def _range(chart: Chart) -> tuple[float, float]:
    values = [v for line in chart.lines.values() for v in line]
    return min(values), max(values)


def _x(x: float, xs: Sequence[int]) -> float:
    span = math.log2(max(xs)) - math.log2(min(xs)) or 1.0
    return LEFT + 14 + (math.log2(x) - math.log2(min(xs))) / span * (WIDTH - LEFT - RIGHT - 28)


def _y(value: float, ticks: Sequence[float], log: bool) -> float:
    low, high, at = ticks[0], ticks[-1], value
    if log:
        low, high, at = math.log10(low), math.log10(high), math.log10(at)
    return HEIGHT - BOTTOM - (at - low) / ((high - low) or 1.0) * (HEIGHT - TOP - BOTTOM)


def _line(colour: str, points: list[tuple[float, float]]) -> list[str]:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in points]
    return [f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>', *dots]


def _legend(names: Sequence[str]) -> str:
    """The names in the colours of their lines, one after the other."""
    spans = (
        f'<tspan fill="{colour}" dx="20">● {escape(name)}</tspan>'
        for colour, name in zip(COLOURS, names, strict=False)
    )
    return f'<text x="{LEFT - 20}" y="58">{"".join(spans)}</text>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
