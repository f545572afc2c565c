"""The pictures of docs/ that come from GPU and speculation results: SVGs, made from the committed
documents in bench/results/.

    python tools/plots.py            writes every picture
    python tools/plots.py --check    exits 1 if a committed picture is not what the results give

The same results give the same file: fixed ids, no date, text as text. Colours and contrast follow
the style table of lockstep/bench/engine.toml, so a picture is legible on light and dark pages.
Targets, floors and names of peers that no result file contains are in plots.toml.

Needs matplotlib in the version of constraints.txt and otherwise the standard library.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.patches import Rectangle
from picture import (
    OTHER_PEER,
    OURS,
    PEER,
    SMALL,
    TARGET,
    Bar,
    Frame,
    Picture,
    draw_bars,
    finish_columns,
    mark_one,
    percent,
    render,
    verdict,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
DOCS = ROOT / "docs"
STATED = tomllib.loads((ROOT / "tools/plots.toml").read_text("utf-8"))

FASTER, EQUAL, SLOWER = "#5fa8d3", "#dcdcdc", "#f4a259"  # cells of the heat map
CELL_TEXT = "#1a1a1a"
CELL_LIMIT = 0.2  # distance from 1.0 at which a cell has its full colour


def read(name: str) -> Any:
    """Reads a document of bench/results/."""
    return json.loads((RESULTS / name).read_text("utf-8"))


def geometric_mean(values: Sequence[float]) -> float:
    return prod(values) ** (1 / len(values))


def case_label(case: str, new: int) -> str:
    """Turns "B8 S4352 N256" into words; `new` is the number of query rows per request."""
    batch, keys = (int(number) for number in re.findall(r"\d+", case)[:2])
    if new == 1:
        requests = "request" if batch == 1 else "requests"
        return f"{batch} {requests}, {keys:,} keys"
    rows = f"{batch} × {new:,}"
    return rows if new == keys else f"{rows}\nafter {keys - new:,}"


def draw_decode(axes: Axes) -> Frame:
    """Draws decode attention by the best peer of each case."""
    name = "attention-h200.json"
    document = read(name)
    run = document["results"]["attention-h200"]
    bars = []
    for row in run["decode"][1:]:
        ours, peer, ratio = row["us"], row["peer"], row["ratio"]
        against = f" against {peer:g}" if peer else ", no peer recorded"
        bars.append(
            Bar(
                label=case_label(row["case"], row["new"]),
                value=ratio,
                shown=f"{ratio:.2f}" if ratio else "",
                note=f"{ours:.1f} µs{against}",
            )
        )
    draw_bars(axes, bars, "speed relative to the best peer; at 1.0 both are equally fast")
    mark_one(axes)
    ratios = [bar.value for bar in bars if bar.value is not None]
    title = (
        f"Decode attention on an H200: {geometric_mean(ratios):.3f} times as fast as the best "
        f"peer\nin geometric mean, {min(ratios):.3f} at the lowest"
    )
    source = (
        f"{run['card']}, torch {run['torch']}, Triton {run['triton']}, order {run['order']}; bf16, "
        f"32/8 heads of 128, page 16\npeer: {STATED['decode']['peers']}; "
        f"bench/results/{name} at {document['environment']['commit']}"
    )
    return Frame(title, source)


def draw_prefill(axes: Axes) -> Frame:
    """Draws causal prefill beside FA4 and cuDNN; cases without a peer have one bar."""
    name = "attention-h200.json"
    document = read(name)
    run = document["results"]["attention-h200"]
    rows = run["prefill"][1:]
    series = {
        "Lockstep, pages of 16": ("TFLOP/s", OURS),
        "FA4, pages of 16, as recorded": ("peer", PEER),
        "cuDNN on contiguous keys, same call": ("cuDNN dense TFLOP/s", OTHER_PEER),
    }
    width = 0.28
    has_peer = [row["peer"] is not None for row in rows]
    for place, (label, (key, color)) in enumerate(series.items()):
        values = [(x, row[key]) for x, row in enumerate(rows) if row[key] is not None]
        xs = [x + (place - 1) * width if has_peer[x] else x for x, _ in values]
        bars = axes.bar(xs, [v for _, v in values], width * 0.94, color=color, label=label)
        axes.bar_label(bars, fmt="{:.0f}", fontsize=SMALL, padding=1)
    ceiling = run["prefill"][0]["floors"]["GEMM 8192 TFLOP/s"]
    axes.axhline(ceiling, color=TARGET, linewidth=2)
    bound = f"GEMM 8192³ in the same call: {ceiling:.0f}"
    axes.text(len(rows) - 0.5, ceiling + 12, bound, ha="right", fontsize=SMALL)
    axes.set_xticks(range(len(rows)), [case_label(row["case"], row["new"]) for row in rows])
    axes.set(ylabel="TFLOP/s", ylim=(0, ceiling * 1.12), xlim=(-0.5, len(rows) - 0.5))
    axes.legend(frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1), fontsize=SMALL)
    finish_columns(axes)
    compared = [row for row in rows if row["peer"] is not None]
    fa4 = geometric_mean([row["ratio"] for row in compared])
    cudnn = geometric_mean([row["TFLOP/s"] / row["cuDNN dense TFLOP/s"] for row in compared])
    title = (
        f"Causal prefill from pages on an H200: {fa4:.2f} of FA4 on pages, {cudnn:.2f} of cuDNN\n"
        f"without pages (geometric means over {len(compared)} cases)"
    )
    source = (
        f"{run['card']}, torch {run['torch']}, Triton {run['triton']}, order {run['order']}; bf16, "
        f"32/8 heads of 128; requests × new rows after cached keys;\n"
        "no peer was recorded behind cached keys; FA4 4.0.0b36; "
        f"bench/results/{name} at {document['environment']['commit']}"
    )
    return Frame(title, source)


def draw_gemm(axes: Axes) -> Frame:
    """Draws the time of the chosen GEMM by cuBLAS's for every shape and number of rows."""
    large, small = read("gemm-h200-8b.json"), read("gemm-h200-0.6b.json")
    run = large["results"]["gemm-h200-8b"]
    shapes = [("8B", shape) for shape in run["shapes"].values()]
    shapes += [("0.6B", shape) for shape in small["shapes"].values()]
    colors = LinearSegmentedColormap.from_list("ratio", [FASTER, EQUAL, SLOWER])
    norm = Normalize(1 - CELL_LIMIT, 1 + CELL_LIMIT, clip=True)
    ratios = []
    for y, (_, shape) in enumerate(shapes):
        for x, cell in enumerate(shape["cells"]):
            ratio = cell["us"]["chosen"] / cell["us"]["cublas"]
            ratios.append(ratio)
            color = colors(norm(ratio))
            axes.add_patch(Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, color=color, linewidth=0))
            own = cell["chosen"].startswith("t")
            weight = "bold" if own else "normal"
            look = {"color": CELL_TEXT, "fontsize": 8, "weight": weight}
            axes.text(x, y, f"{ratio:.2f}", ha="center", va="center_baseline", **look)
    rows = [cell["m"] for cell in shapes[0][1]["cells"]]
    axes.set_xticks(range(len(rows)), [str(m) for m in rows], fontsize=SMALL)
    labels = [f"{size}: {shape['n']} × {shape['k']}" for size, shape in shapes]
    axes.set_yticks(range(len(shapes)), labels, fontsize=SMALL)
    axes.set(xlim=(-0.5, len(rows) - 0.5), ylim=(len(shapes) - 0.5, -0.5))
    axes.set(xlabel="rows", ylabel="model: N × K")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    mean = sum(ratios) / len(ratios)
    slower = sum(ratio > 1.005 for ratio in ratios)
    title = (
        f"GEMM with the same bits for every number of rows: {mean:.2f} of cuBLAS's time\n"
        f"on average, {max(ratios):.2f} at worst; {slower} of {len(ratios)} cells are slower"
    )
    machine = run["machine"]
    source = (
        "time by cuBLAS time, blue is faster, orange slower; "
        "bold: our kernel, otherwise a library's with the same bits\n"
        f"driver {machine['card']}, torch {machine['torch']}, Triton {machine['triton']}; "
        f"bench/results/gemm-h200-8b.json at {large['environment']['commit']}, "
        "gemm-h200-0.6b.json (an earlier call)"
    )
    return Frame(title, source)


def engine_source(document: Any, name: str) -> str:
    """Says on what the engine's document was measured."""
    place = document["environment"]
    return (
        f"NVIDIA H200, torch {place['torch']}, {place['cores']} cores; Qwen3 shapes, random "
        f"weights, bf16; bench/results/{name} at {place['commit']}"
    )


def draw_throughput(axes: Axes) -> Frame:
    """Draws output tokens per second beside the peer, under what the card allows."""
    name = "engine-h200.json"
    document = read(name)
    models = document["results"]["engine-h200"]
    stated = STATED["throughput"]
    width = 0.34
    ratios = {}
    for x, entry in enumerate(stated["models"]):
        run = models[entry["model"]]["run"]
        ours, peer, floor = run["output_tokens_per_s"], run["must"], entry["floor"]
        ratios[entry["model"].upper()] = ours / peer
        kinds = (("Lockstep", ours, OURS, -width / 2), (stated["peer"], peer, PEER, width / 2))
        for label, value, color, shift in kinds:
            bars = axes.bar(x + shift, value, width * 0.96, color=color, label=label)
            axes.bar_label(bars, fmt="{:,.0f}", padding=2)
        label = "what bandwidth and flops allow"
        axes.hlines(floor, x - width, x + width, TARGET, linewidth=2.5, label=label)
        share = f"{floor:,}; Lockstep is at {percent(ours / floor)}"
        axes.text(x, floor + 600, share, ha="center", fontsize=SMALL)
    axes.set_xticks(range(len(ratios)), [f"Qwen3-{size} shape" for size in ratios])
    axes.set(ylabel="output tokens/s", xlim=(-0.6, len(ratios) - 0.4), ymargin=0.1)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles))
    place = {"loc": "lower center", "bbox_to_anchor": (0.5, 1), "ncols": 3, "fontsize": SMALL}
    axes.legend(once.values(), once, frameon=False, **place)
    finish_columns(axes)
    against = " and ".join(f"{ratio:.2f} ({size})" for size, ratio in ratios.items())
    peer_name = stated["peer"].partition(" ")[0]
    title = f"256 requests on an H200: {against} times the\noutput tokens/s of {peer_name}"
    work = "256 requests of 100 to 1,024 tokens in and out, all there at the start"
    return Frame(title, f"{work}\n{engine_source(document, name)}")


def draw_steps(axes: Axes) -> Frame:
    """Draws decode steps in per cent of their bandwidth floors, with their targets."""
    name = "engine-h200.json"
    document = read(name)
    models = document["results"]["engine-h200"]
    bars = []
    for entry in STATED["steps"]:
        steps = models[entry["model"]]["steps"]
        (step,) = (row for row in steps if row["requests"] == entry["requests"])
        share = step["floor_ms"] / step["step_ms"]
        target = entry.get("target_share") or step["floor_ms"] / entry["target_ms"]
        aim = percent(target)
        if "target_ms" in entry:
            aim = f"{entry['target_ms']} ms"
        reached = "missed" if share < target else "reached"
        requests = "request" if step["requests"] == 1 else "requests"
        bars.append(
            Bar(
                label=f"{entry['model'].upper()}, {step['requests']} {requests}"
                f"\nof {step['keys']:,} keys",
                value=100 * share,
                shown=percent(share),
                note=f"{step['step_ms']:.2f} ms, floor {step['floor_ms']:.2f} ms"
                f"\ntarget {aim}: {reached}",
                target=100 * target,
            )
        )
    draw_bars(axes, bars, "bandwidth floor by time of the step, %")
    best, worst = (pick(bars, key=lambda bar: bar.value) for pick in (max, min))
    best_label, worst_label = (bar.label.replace("\n", " ") for bar in (best, worst))
    title = (
        f"Decode steps on an H200: {best.shown} of the bandwidth floor ({best_label}),\n"
        f"{worst.shown} ({worst_label}); {verdict(bars)}"
    )
    how = "hatched: target missed; CUDA graph with head and sampler"
    return Frame(title, f"{how}\n{engine_source(document, name)}")


def draw_drafts_gpu(axes: Axes) -> Frame:
    """Draws speculation on a GPU by plain decoding, with its targets."""
    name = "speculative-h200.json"
    document = read(name)
    bars = []
    for row in document["rows"]:
        times = {kind: sorted(runs)[len(runs) // 2] for kind, runs in row["ms_per_token"].items()}
        bars.append(
            Bar(
                label=row["case"],
                value=row["ratio"],
                shown=f"{row['ratio']:.2f}",
                note=f"{times['speculative']:.2f} ms per token against {times['plain']:.2f}",
                target=row["must"],
            )
        )
    draw_bars(axes, bars, "speed relative to plain decoding")
    mark_one(axes)
    oracles = [row for row in document["rows"] if row["case"].startswith("oracle")]
    others = [f"{row['ratio']:.2f} at {row['batch']}" for row in oracles[1:]]
    title = (
        f"Speculation on an H200 with an oracle's drafts: {oracles[0]['ratio']:.2f} times plain\n"
        f"decoding at batch {oracles[0]['batch']}, {', '.join(others)}; {verdict(bars)}"
    )
    tokens = oracles[0]["tokens_per_verify"]
    source = (
        f"oracle: {tokens:.1f} tokens per verify, at the cost of an EAGLE-3 head; "
        "always wrong: no draft token is accepted\n"
        f"{document['card']}, Qwen3-8B shape, random weights; "
        f"bench/results/{name} at {document['commit']}"
    )
    return Frame(title, source)


def draw_drafts_cpu(axes: Axes) -> Frame:
    """Draws speculation on a CPU by plain decoding, with its targets."""
    name = "speculative-cpu.json"
    document = read(name)
    bars = []
    for case in document["cases"]:
        ratio, times = case["ratios"]["plain"], case["values"]
        bars.append(
            Bar(
                label=case["case"],
                value=ratio,
                shown=f"{ratio:.2f}",
                note=f"{times['lockstep']:.2f} ms per token against {times['plain']:.2f}",
                target=case["targets"]["plain"],
            )
        )
    draw_bars(axes, bars, "speed relative to plain decoding")
    mark_one(axes)
    ratios = [bar.value for bar in bars if bar.value is not None]
    place = document["environment"]
    title = (
        f"Speculation on {place['threads']} CPU cores: {min(ratios):.2f} to {max(ratios):.2f} "
        f"times plain decoding;\n{verdict(bars)}"
    )
    source = (
        f"{place['cpu']}, {place['threads']} threads, torch {place['torch']}, Numba "
        f"{place['numba']}; built-in model, batch 1\n"
        f"bench/results/{name} at {place['commit']}"
    )
    return Frame(title, source)


PICTURES = (
    Picture("attention-decode-h200.svg", 4.3, draw_decode),
    Picture("attention-prefill-h200.svg", 4.6, draw_prefill),
    Picture("gemm-h200.svg", 4.3, draw_gemm),
    Picture("engine-h200-throughput.svg", 4.4, draw_throughput),
    Picture("engine-h200-steps.svg", 3.3, draw_steps),
    Picture("speculation-h200.svg", 3.6, draw_drafts_gpu),
    Picture("speculation-cpu.svg", 3.4, draw_drafts_cpu),
)


def main(options: Sequence[str]) -> int:
    """Writes the pictures, or with `--check` returns 1 if one is not up to date."""
    stale = 0
    for picture in PICTURES:
        path = DOCS / picture.file
        content = render(picture)
        if "--check" not in options:
            path.write_bytes(content)
        elif not path.exists() or path.read_bytes() != content:
            remedy = "it is not what bench/results/ gives: run make plots"
            print(f"docs/{picture.file}: {remedy}", file=sys.stderr)
            stale += 1
    return int(stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
