"""How speed scales: with the number of requests, and with the length of the context. Two curves,
measured and drawn.

`measure` gives plain data that goes into the document of `bench engine`; `draw` makes the pictures
of `docs/` from a document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.bench.cases import Contenders
from lockstep.bench.machine import Measure, Timing, note
from lockstep.bench.work import Ours, Tokens, prompts
from lockstep.types import RuleError

Curve = dict[str, Any]
StepSeconds = Callable[[tuple[Tokens, ...], int], float]

FILES = {"requests": "engine-requests.svg", "context": "engine-context.svg"}
CROWD_CONTEXT = 128
GREY = "#808080"  # enough contrast on white and on black
BY_CONTEXT = (
    ("100 M, 8 requests", "100m", 8),
    ("100 M, 1 request", "100m", 1),
    ("built-in, 1 request", "builtin", 1),
)


def measure(contenders: Contenders) -> dict[str, Curve]:
    """Both curves."""
    return {"requests": by_requests(contenders), "context": by_context(contenders)}


def by_requests(contenders: Contenders) -> Curve:
    """New tokens per second while 1 ... 256 requests decode, all at the same context; the peer's
    static batch beside it."""
    ours, sizes = contenders.ours("builtin"), contenders.sizes
    context = min(CROWD_CONTEXT, max(sizes.contexts))
    ways: dict[str, StepSeconds] = {"Lockstep": ours.step_s}
    if contenders.compares:
        ways["transformers, static batch"] = contenders.peer("builtin").step_s
    curve = Curve(
        x=list(sizes.crowds),
        unit="new tokens per second",
        context=context,
        lines={name: [] for name in ways},
        undisturbed=True,
    )
    for count in sizes.crowds:
        many = nested(ours, count, context, sizes.steps)
        timing = _point(contenders, f"{count} requests", ways, many)
        curve["undisturbed"] &= timing.undisturbed
        for name in ways:
            curve["lines"][name].append(round(count / timing.median(name), 1))
    return curve


def by_context(contenders: Contenders) -> Curve:
    """Milliseconds of a decode step at contexts up to what each model has."""
    sizes = contenders.sizes
    curve = Curve(x=list(sizes.contexts), unit="ms per step", lines={}, undisturbed=True)
    for label, model, count in BY_CONTEXT:
        ours, line = contenders.ours(model), list[float]()
        for context in (c for c in sizes.contexts if c <= ours.engine.context_length):
            many = nested(ours, count, context, sizes.steps)
            timing = _point(contenders, f"{label}, {context}", {"Lockstep": ours.step_s}, many)
            curve["undisturbed"] &= timing.undisturbed
            line.append(round(timing.median("Lockstep") * 1e3, 3))
        curve["lines"][label] = line
    return curve


def _point(
    contenders: Contenders, what: str, ways: Mapping[str, StepSeconds], many: tuple[Tokens, ...]
) -> Timing:
    """Seconds per step of each way."""

    def measure(way: StepSeconds) -> Measure:
        return lambda _: way(many, contenders.sizes.steps)

    contenders.on_progress = lambda text: note(f"curve, {what}: {text}")
    return contenders.alternate({name: measure(way) for name, way in ways.items()})


def nested(ours: Ours, count: int, context: int, steps: int) -> tuple[Tokens, ...]:
    """Different prompts, each the beginning of what it is at a longer context, in the cache of our
    engine; the steps are measured around `context` keys."""
    most = ours.engine.context_length - steps - count // 16 - 4
    length = min(context - steps // 2, most)
    many = tuple(prompts((length,), ours.vocab_size, 10_000 + i)[0] for i in range(count))
    ours.prime(many)
    return many


def draw(curves: Mapping[str, Curve], environment: Mapping[str, Any], folder: str) -> list[Path]:
    """Writes the pictures; returns where."""
    where = "{cpu}, {threads} threads, fp32, commit {commit}".format_map(environment)
    crowd = f"Decode throughput, built-in model, context {curves['requests']['context']}"
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / file for file in FILES.values()]
    _draw(paths[0], curves["requests"], (crowd, where, "requests"))
    titles = ("A decode step by context length", where, "context, keys")
    _draw(paths[1], curves["context"], titles, yscale="log")
    return paths


def _draw(path: Path, curve: Curve, titles: tuple[str, str, str], yscale: str = "linear") -> None:
    """One picture: x in powers of two, readable on light and dark pages."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        remedy = "pip install -c constraints.txt -e '.[bench]'"
        raise RuleError("curves are drawn by matplotlib", str(error), remedy) from None
    title, subtitle, x_label = titles
    grey = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor"), GREY)
    ticks = dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), GREY)
    fixed = {"svg.fonttype": "none", "svg.hashsalt": title}  # the same numbers, the same file
    with matplotlib.rc_context({**grey, **ticks, **fixed}):
        figure = Figure(figsize=(6.4, 3.7), layout="constrained")
        axes = figure.subplots()
        for name, values in curve["lines"].items():  # a line may end early
            axes.plot(curve["x"][: len(values)], values, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale(yscale)
        axes.set_xticks(curve["x"], [f"{x:,}" for x in curve["x"]])
        axes.set(xlabel=x_label, ylabel=curve["unit"])
        axes.set_title(subtitle, fontsize="x-small")
        axes.yaxis.set_major_formatter("{x:,g}")
        if yscale == "linear":
            axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
        figure.suptitle(title)
        figure.savefig(path, format="svg", transparent=True, metadata={"Date": None})
