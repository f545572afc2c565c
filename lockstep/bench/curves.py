"""How speed scales: with the number of requests, and with the length of the context. Two curves,
measured and drawn.

`measure` gives plain data that goes into the document of `bench engine`; `draw` makes the pictures
of `docs/` from a document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lockstep.bench.machine import Timing, note
from lockstep.bench.rig import Rig
from lockstep.bench.svg import Chart, svg
from lockstep.bench.work import Ours, Tokens, prompts

Curve = dict[str, Any]
StepSeconds = Callable[[tuple[Tokens, ...], int], float]

FILES = {"requests": "engine-requests.svg", "context": "engine-context.svg"}
CROWD_CONTEXT = 128
BY_CONTEXT = (
    ("100 M, 8 requests", "100m", 8),
    ("100 M, 1 request", "100m", 1),
    ("built-in, 1 request", "builtin", 1),
)


def measure(rig: Rig) -> dict[str, Curve]:
    """Both curves."""
    return {"requests": by_requests(rig), "context": by_context(rig)}


def by_requests(rig: Rig) -> Curve:
    """New tokens per second while 1 ... 256 requests decode, all at the same context; the peer's
    static batch beside it."""
    ours, steps = rig.ours("builtin"), rig.sizes.steps
    context = min(CROWD_CONTEXT, max(rig.sizes.contexts))
    ways: dict[str, StepSeconds] = {"Lockstep": ours.step_s}
    if rig.compares:
        ways["transformers, static batch"] = rig.peer("builtin").step_s
    points = []
    for count in rig.sizes.crowds:
        many = nested(ours, count, context, steps)
        ours.prime(many)
        rates = {name: _rate(way, many, steps) for name, way in ways.items()}
        points.append(_point(rig, f"{count} requests", rates))
    lines = {name: [round(point.median(name), 1) for point in points] for name in ways}
    quiet = all(point.quiet for point in points)
    return {
        "x": list(rig.sizes.crowds),
        "unit": "new tokens per second",
        "context": context,
        "lines": lines,
        "undisturbed": quiet,
    }


def by_context(rig: Rig) -> Curve:
    """Milliseconds of a decode step at contexts up to what each model has."""
    lines, quiet = dict[str, list[float]](), True
    for label, model, count in BY_CONTEXT:
        ours = rig.ours(model)
        for context in (c for c in rig.sizes.contexts if c <= ours.engine.context_length):
            many = nested(ours, count, context, rig.sizes.steps)
            ours.prime(many)
            point = _point(
                rig,
                f"{label}, context {context}",
                {label: _milliseconds(ours.step_s, many, rig.sizes.steps)},
            )
            quiet &= point.quiet
            lines.setdefault(label, []).append(round(point.median(label), 3))
    return {
        "x": list(rig.sizes.contexts),
        "unit": "ms per step",
        "lines": lines,
        "undisturbed": quiet,
    }


def _rate(way: StepSeconds, many: tuple[Tokens, ...], steps: int) -> Callable[[int], float]:
    return lambda _: len(many) / way(many, steps)


def _milliseconds(way: StepSeconds, many: tuple[Tokens, ...], steps: int) -> Callable[[int], float]:
    return lambda _: way(many, steps) * 1e3


def _point(rig: Rig, what: str, contenders: Mapping[str, Callable[[int], float]]) -> Timing:
    rig.say = lambda text: note(f"curve, {what}: {text}")
    return rig.turns(contenders)


def nested(ours: Ours, count: int, context: int, steps: int) -> tuple[Tokens, ...]:
    """Different prompts, each the beginning of what it is at a longer context; the steps are
    measured around `context` keys."""
    most = ours.engine.context_length - steps - count // 16 - 4
    length = min(context - steps // 2, most)
    return tuple(prompts((length,), ours.vocab_size, 10_000 + i)[0] for i in range(count))


def draw(curves: Mapping[str, Curve], environment: Mapping[str, Any], folder: str) -> list[Path]:
    """Writes the pictures; returns where."""
    where = (
        f"{environment['cpu']}, {environment['threads']} threads, fp32, commit "
        f"{environment['commit']}"
    )
    requests, context = curves["requests"], curves["context"]
    charts = {
        "requests": Chart(
            f"Decode throughput, built-in model, context {requests['context']}",
            where,
            "requests",
            requests["unit"],
            requests["x"],
            requests["lines"],
        ),
        "context": Chart(
            "A decode step by context length",
            where,
            "context, keys",
            context["unit"],
            context["x"],
            context["lines"],
            True,
        ),
    }
    Path(folder).mkdir(parents=True, exist_ok=True)
    paths = [Path(folder) / FILES[name] for name in charts]
    for path, chart in zip(paths, charts.values(), strict=True):
        path.write_text(svg(chart), encoding="utf-8")
    return paths
