"""What the pictures of tools/plots.py have in common: colours, horizontal bars with targets, and a
figure as SVG that is the same whenever its numbers are.

Text and axes have the grey of the style table of lockstep/bench/engine.toml, so a picture is
legible on light and dark pages.
"""

from __future__ import annotations

import io
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
STYLE = tomllib.loads((ROOT / "lockstep/bench/engine.toml").read_text("utf-8"))["style"]

OURS = "#1f77b4"
PEER = "#999999"
OTHER_PEER = "#9467bd"
TARGET = "#ff7f0e"  # targets and bounds
SMALL = "small"
WIDTH = 8.0  # inches


@dataclass(frozen=True)
class Frame:
    """What surrounds a picture: its finding, and where its numbers come from."""

    title: str
    source: str


@dataclass(frozen=True)
class Picture:
    """A file in docs/ and the function that draws it."""

    file: str
    height: float  # inches
    draw: Callable[[Axes], Frame]


@dataclass(frozen=True)
class Bar:
    """A horizontal bar. Without a value only its label and its note are drawn."""

    label: str
    value: float | None
    shown: str  # the value as text
    note: str  # right of the plot
    target: float | None = None

    @property
    def missed(self) -> bool:
        return None not in (self.value, self.target) and self.value < self.target


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def verdict(bars: Iterable[Bar]) -> str:
    """Says in words how many targets are missed."""
    judged = [bar for bar in bars if bar.target is not None]
    missed = sum(bar.missed for bar in judged)
    if not missed:
        return "every target is reached"
    return f"{missed} of {len(judged)} targets are missed"


def draw_bars(axes: Axes, bars: Sequence[Bar], x_label: str) -> None:
    """Draws horizontal bars from top to bottom; a missed target has a hollow, hatched bar.

    A value stands at the end of its bar, or behind the mark of its target where the mark is there.
    """
    right = max(max(bar.value or 0, bar.target or 0) for bar in bars)
    gap, text_width = right / 50, right / 8
    for y, bar in enumerate(bars):
        if bar.value is None:
            continue
        look: dict[str, Any] = {"color": OURS}
        if bar.missed:
            look = {"facecolor": "none", "edgecolor": OURS, "hatch": "////", "linewidth": 1.5}
        axes.barh(y, bar.value, height=0.6, **look)
        end = bar.value
        if bar.target is not None and end < bar.target < end + text_width:
            end = bar.target
        axes.text(end + gap, y, bar.shown, va="center_baseline")
    marks = [(y, bar.target) for y, bar in enumerate(bars) if bar.target is not None]
    if marks:
        low, high = ([y + half for y, _ in marks] for half in (-0.42, 0.42))
        axes.vlines([x for _, x in marks], low, high, TARGET, linewidth=3, label="target")
        axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0)
    axes.set_yticks(range(len(bars)), [bar.label for bar in bars])
    axes.set(xlim=(0, right * 1.15), ylim=(len(bars) - 0.4, -0.6), xlabel=x_label)
    notes = axes.twinx()
    notes.set_ylim(axes.get_ylim())
    notes.set_yticks(range(len(bars)), [bar.note for bar in bars], fontsize=SMALL)
    for each in (axes, notes):
        each.tick_params(axis="y", length=0)
        each.spines[["top", "right"]].set_visible(False)


def mark_one(axes: Axes) -> None:
    """Draws the line at which both sides are equal."""
    axes.axvline(1, color=STYLE["text.color"], linestyle="--", linewidth=1.4)


def finish_columns(axes: Axes) -> None:
    """Removes what vertical bars do not need around them."""
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)


def render(picture: Picture) -> bytes:
    """Returns a picture as SVG, whatever settings of matplotlib the user has."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**STYLE, "svg.hashsalt": picture.file})
        figure = Figure(figsize=(WIDTH, picture.height), layout="constrained")
        frame = picture.draw(figure.subplots())
        figure.suptitle(frame.title, fontsize="large")
        figure.supxlabel(frame.source, fontsize="x-small")
        out = io.BytesIO()
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return out.getvalue()
