"""How speed scales, with the number of requests and with the length of the context: `measure` gives
data for the document of `bench engine`, `draw` makes the pictures of `docs/` from a document.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.bench.machine import note
from lockstep.bench.work import Ours, Tokens, prompts
from lockstep.types import RuleError

if TYPE_CHECKING:
    from lockstep.bench.engine import Contenders

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


def measure(contenders: "Contenders") -> dict[str, Curve]:
    sizes, builtin = contenders.sizes, contenders.ours("builtin")
    context = min(CROWD_CONTEXT, max(sizes.contexts))
    ways: dict[str, StepSeconds] = {"Lockstep": builtin.step_s}
    if contenders.compares:
        ways["transformers, static batch"] = contenders.peer("builtin").step_s
    crowds = Curve(x=list(sizes.crowds), unit="new tokens per second", context=context, lines={})
    for count in sizes.crowds:
        for name, seconds in _point(contenders, crowds, builtin, (count, context), ways).items():
            crowds["lines"].setdefault(name, []).append(round(count / seconds, 1))
    contexts = Curve(x=list(sizes.contexts), unit="ms per step", lines={})
    for label, model, count in BY_CONTEXT:
        ours = contenders.ours(model)
        for context in (c for c in sizes.contexts if c <= ours.engine.context_length):
            way = {label: ours.step_s}
            (seconds,) = _point(contenders, contexts, ours, (count, context), way).values()
            contexts["lines"].setdefault(label, []).append(round(seconds * 1e3, 3))
    return {"requests": crowds, "context": contexts}


def _point(
    contenders: "Contenders",
    curve: Curve,
    ours: Ours,
    crowd: tuple[int, int],
    ways: Mapping[str, StepSeconds],
) -> dict[str, float]:
    """Seconds per step of each way, with so many requests around so many keys. Prompts are in our
    cache, each the beginning of what it is at a longer context."""
    (count, context), steps = crowd, contenders.sizes.steps
    note(f"curve, {count} of {context} keys")
    length = min(context - steps // 2, ours.engine.context_length - steps - count // 16 - 4)
    many = tuple(prompts((length,), ours.vocab_size, 10_000 + i)[0] for i in range(count))
    ours.prime(many)
    measures = {name: lambda _, way=way: way(many, steps) for name, way in ways.items()}
    timing = contenders.alternate(measures)
    curve["undisturbed"] = curve.get("undisturbed", True) and timing.undisturbed
    return {name: timing.median(name) for name in ways}


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
