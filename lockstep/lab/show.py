"""One cell, step by step: what happened, the plan of every step, the page tables, and every row
against its answer.

Runs the recipe once in a world that writes down what it sees, and judges nothing; a cell of the
engine is told by its steps and ends with what was found. For people who want to know why a cell is
red: `lab show` calls it, with a bug put back or without.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.attention import select
from lockstep.lab.cells import Cell, cells, refusal
from lockstep.lab.oracle import Answer
from lockstep.lab.properties import material
from lockstep.lab.rig import Glass, Rig
from lockstep.lab.script import Accept, Act, Compute, Drop
from lockstep.lab.sheets import ENGINE
from lockstep.lab.world import Setting, World
from lockstep.plan.build import build
from lockstep.plan.step import PagedGroup, StepPlan
from lockstep.sched.request import Piece, Step
from lockstep.types import Layout, RuleError

WORST = 3  # rows shown number by number
SOME = 16  # rows listed per group where the step was not asked for by name


class Watched(World):
    """A world that keeps its plans and compares every row as soon as it is computed."""

    answers: list[list[Answer]]

    def watch(self, answers: list[list[Answer]]) -> list[dict[str, Any]]:
        """Plays the whole story; an error of the code under test is the last thing told."""
        self.answers, self.told, self.made = answers, list[dict[str, Any]](), list[StepPlan]()
        try:
            self.run()
        except (
            Exception
        ) as error:  # a broken backend may raise anything; that is what one wants to see
            self.told[-1]["error"] = f"{type(error).__name__}: {error}"
        return self.told

    def _play(self, acts: tuple[Act, ...]) -> None:
        self.told.append(
            {
                "step": len(self.told),
                "acts": [tell(a) for a in acts] or ["an empty step"],
                "launches": [],
            }
        )
        super()._play(acts)

    def plan(self, computes: list[Compute], groups: tuple[int, ...]) -> StepPlan:
        plan = super().plan(computes, groups)
        self.told[-1]["launches"].append(
            describe(plan, groups, [a.request for a in computes]) | {"rows": []}
        )
        self.made.append(plan)
        return plan

    def _launch(self, computes: list[Compute], groups: tuple[int, ...]) -> None:
        known = len(self.record.faults)
        super()._launch(computes, groups)
        launch, plan = self.told[-1]["launches"][-1], self.made[-1]
        launch["faults"] = self.record.faults[known:]
        uids = [uid for act in computes for uid in act.uids]
        places = [
            (act.request, int(p))
            for p, act in zip(plan.positions, (a for a in computes for _ in a.uids), strict=False)
        ]
        for g in groups:
            if uids and bool(self.record.seen[g][uids].all()):
                launch["rows"] += self._rows(g, places, uids)

    def _rows(self, g: int, places: list[tuple[int, int]], uids: list[int]) -> list[dict[str, Any]]:
        """One entry per row and layer of a group."""
        out = []
        for layer, answer in enumerate(self.answers[g]):
            have = (
                self.record.out[g][layer][uids].double(),
                self.record.lse[g][layer][uids].double(),
            )
            errors = [_off(have[0], answer.out[uids]).amax(2), _off(have[1], answer.lse[uids])]
            tolerances = [answer.out_tol[uids], answer.lse_tol[uids]]
            shares = [
                (e / t).nan_to_num(nan=torch.inf, posinf=torch.inf)
                for e, t in zip(errors, tolerances, strict=True)
            ]
            for row, uid in enumerate(uids):
                request, position = places[row]
                entry: dict[str, Any] = {
                    "group": g,
                    "layer": layer,
                    "row": row,
                    "request": request,
                    "position": position,
                    "token": uid,
                }
                for name, error, tol, share in zip(
                    ("out", "lse"), errors, tolerances, shares, strict=True
                ):
                    head = int(share[row].argmax())
                    entry[name] = {
                        "head": head,
                        "error": float(error[row, head]),
                        "tolerance": float(tol[row, head]),
                    }
                    entry[name]["used"] = float(share[row, head])
                head = entry["out"]["head"]
                entry["have"] = [*have[0][row, head].tolist()]
                entry["want"] = [*answer.out[uid, head].tolist()]
                entry["lse_pair"] = [
                    float(have[1][row, entry["lse"]["head"]]),
                    float(answer.lse[uid, entry["lse"]["head"]]),
                ]
                out.append(entry)
        return out


def story(cell: Cell, checks: bool = True) -> list[dict[str, Any]]:
    """The cell as data: a list of steps."""
    backend = select.load(cell.backend)
    if cell not in cells([cell.backend]):
        raise RuleError(
            "a cell's recipe makes sense for its feature",
            str(cell),
            "See `lockstep lab run --list`",
        )
    why = refusal(cell, backend)
    if why is not None:
        raise RuleError(
            f"backend {cell.backend} takes the cell",
            f"a refusal: {why}",
            "Show it on another backend",
        )
    if cell.sheet is ENGINE:
        return engine_story(cell, checks)
    script, rows, answers = material(cell.recipe, cell.feature)
    return Watched(
        cell.pair()[1], script, rows, backend, Setting(checks=checks, inspect=True)
    ).watch(answers)


def engine_story(cell: Cell, checks: bool) -> list[dict[str, Any]]:
    """Every step of every engine that the recipe starts, and at last what was found."""
    recipe, tiny = cell.pair()
    rig, told = Rig(tiny, select.load(cell.backend), checks), list[dict[str, Any]]()
    known: list[Glass] = []

    def see(engine: Glass, step: Step) -> None:
        acts = []
        if engine not in known:
            known.append(engine)
            c = engine.config
            tree = "no prefix tree" if c.disable_radix_cache else "a prefix tree"
            acts.append(
                f"engine {len(known)}: pages of {c.page_size}, {c.chunked_prefill_size} rows a "
                f"step, {c.max_total_tokens} keys, {tree}"
            )
        acts += [tell_piece(piece) for piece in step.pieces]
        plan = build([engine.specs[g] for g in step.groups], step.works)
        launch = describe(plan, step.groups, [piece.request.arrival for piece in step.pieces]) | {
            "rows": []
        }
        told.append({"step": len(told), "acts": acts, "launches": [launch]})

    rig.tell = see
    recipe.play(rig, True)
    found = [f"{name}: {fault}" for name, faults in rig.faults.items() for fault in faults]
    told.append(
        {
            "step": len(told),
            "acts": [f"FOUND {f}" for f in found] or ["nothing was wrong"],
            "launches": [],
        }
    )
    return told


def tell_piece(piece: Piece) -> str:
    """A request's share of a step in words."""
    index = f" completion {piece.request.index}" if piece.request.index else ""
    told = (
        f"request {piece.request.arrival}{index}: {piece.new_len} rows after {piece.cached_len} "
        "keys"
    )
    scored = len(piece.emit) - piece.samples
    return (
        told
        + (f", {scored} scored" if scored else "")
        + (f", {piece.samples} sampled" if piece.samples else "")
    )


def tell(act: Act) -> str:
    """An act in words."""
    if isinstance(act, Drop):
        return f"request {act.request} gives its pages back"
    if isinstance(act, Accept):
        return (
            f"request {act.request} accepts the nodes {list(act.nodes)} after {act.cached_len} keys"
        )
    if not isinstance(act, Compute):
        return (
            f"request {act.child} continues the first {act.cached_len} keys of request "
            f"{act.request}"
        )
    what = "encoder rows" if act.encoder else "tree rows" if act.parents is not None else "rows"
    told = f"request {act.request}: {len(act.uids)} {what} after {act.cached_len} keys"
    told += f", tree {list(act.parents)}" if act.parents is not None else ""
    rejected = len(act.uids) - act.keep if act.parents is None and not act.encoder else 0
    return told + (f", the last {rejected} rejected" if rejected else "")


def describe(plan: StepPlan, groups: tuple[int, ...], names: list[int]) -> dict[str, Any]:
    """Every array of a plan, and each request's pages. `names` are the story's own numbers of the
    plan's requests."""
    arrays = {
        f.name: getattr(plan, f.name).tolist()
        for f in fields(plan)
        if isinstance(getattr(plan, f.name), np.ndarray)
    }
    told = []
    for g, group in zip(groups, plan.groups, strict=True):
        spec, mine = group.spec, dict[str, Any]()
        if isinstance(group, PagedGroup):
            mine = {
                f.name: getattr(group, f.name).tolist() for f in fields(group) if f.name != "spec"
            }
            mine["pages"] = _tables(group, names)
        kind = f"{spec.layout} {spec.heads}/{spec.kv_heads} heads of {spec.d_qk}, {spec.kv_dtype}"
        kind += f", window {spec.window}" if spec.window else ""
        kind += f", pages of {spec.page_size}" if spec.layout is not Layout.FRESH else ""
        told.append({"group": g, "spec": kind, "arrays": mine})
    return {"real": vars(plan.real), "bucket": vars(plan.bucket), "arrays": arrays, "groups": told}


def _tables(group: PagedGroup, names: list[int]) -> list[dict[str, Any]]:
    """Per request, its pages and the positions they hold."""
    out = []
    for i, name in enumerate(names):
        first, end = int(group.first_pos[i]), int(group.kv_lens[i])
        ids = group.page_ids[group.page_indptr[i] : group.page_indptr[i + 1]].tolist()
        held = -(-(end - first) // group.spec.page_size)
        out.append(
            {
                "request": name,
                "first_pos": first,
                "kv_len": end,
                "ids": ids[:held],
                "scratch": ids[held:],
            }
        )
    return out


def _off(have: Tensor, want: Tensor) -> Tensor:
    """Distance, with infinity for what is no number."""
    return torch.where(have == want, 0.0, (have - want).abs()).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )


def text(cell: Cell, steps: list[dict[str, Any]], only: int | None) -> str:
    """The story to read. A step asked for by number is told in full."""
    recipe, feature = cell.pair()
    lines = [f"{cell}: {recipe.says}; {feature.says}", f"steps: {len(steps)}"]
    for step in steps:
        if only in (None, step["step"]):
            lines += ["", f"step {step['step']}", *(f"  {act}" for act in step["acts"])]
            for launch in step["launches"]:
                lines += _launch_text(launch, full=only is not None)
            lines += [f"  RAISED {step['error']}"] if "error" in step else []
    return "\n".join(lines)


def _launch_text(launch: dict[str, Any], full: bool) -> list[str]:
    real = launch["real"]
    lines = [f"  plan: {real['requests']} requests, {real['tokens']} rows, {real['emits']} emitted"]
    lines += [f"    {name:<12} {_array(values, full)}" for name, values in launch["arrays"].items()]
    for group in launch["groups"]:
        lines.append(f"  group {group['group']}: {group['spec']}")
        lines += [
            f"    {name:<12} {_array(v, full)}"
            for name, v in group["arrays"].items()
            if name not in ("pages", "page_ids")
        ]
        for table in group["arrays"].get("pages", []):
            scratch = f" scratch {table['scratch']}" if table["scratch"] else ""
            span = f"[{table['first_pos']}, {table['kv_len']})"
            lines.append(
                f"    request {table['request']}: positions {span} in pages "
                f"{_array(table['ids'], full)}{scratch}"
            )
    lines += [f"  FAULT {fault}" for fault in launch.get("faults", [])]
    for g in dict.fromkeys(r["group"] for r in launch["rows"]):
        lines += _rows_text([r for r in launch["rows"] if r["group"] == g], g, full)
    return lines


def _rows_text(rows: list[dict[str, Any]], g: int, full: bool) -> list[str]:
    """A line per row and layer, worst ones number by number. NaN and infinity sort as worst."""
    ranked = sorted(rows, key=lambda r: -max(r["out"]["used"], r["lse"]["used"]))
    shown = rows if full else sorted(ranked[:SOME], key=lambda r: (r["layer"], r["row"]))
    lines = [f"  group {g} against float64 (share of the tolerance; 1 is the limit)"]
    lines += [
        "     row request position layer   out error  tolerance  share   lse error  tolerance  "
        "share"
    ]
    for r in shown:
        pair = "   ".join(
            f"{r[k]['error']:9.3g} {r[k]['tolerance']:10.3g} {r[k]['used']:6.3f}"
            for k in ("out", "lse")
        )
        late = "  <-- too far" if max(r["out"]["used"], r["lse"]["used"]) > 1 else ""
        lines.append(
            f"    {r['row']:4} {r['request']:7} {r['position']:8} {r['layer']:5}   {pair}{late}"
        )
    if len(shown) < len(rows):
        rest = max(max(r["out"]["used"], r["lse"]["used"]) for r in ranked[len(shown) :])
        lines.append(
            f"    and {len(rows) - len(shown)} more, at most {rest:.3f} of the tolerance; --step N "
            "lists them all"
        )
    for r in ranked[:WORST]:
        lines += [
            f"    row {r['row']} layer {r['layer']} head {r['out']['head']}: backend above, "
            "float64 below"
        ]
        lines += [
            "      "
            + " ".join(f"{x:10.6f}" for x in r[key][:8])
            + (" ..." if len(r[key]) > 8 else "")
            for key in ("have", "want")
        ]
        lines.append(
            f"      lse of head {r['lse']['head']}: {r['lse_pair'][0]:.7f} | {r['lse_pair'][1]:.7f}"
        )
    return lines


def _array(values: list[Any], full: bool) -> str:
    """Runs as ranges (3..7), repeats as 0 x 12, pairs as a>b; the middle of what is still long left
    out unless asked for in full."""
    plain = [f"{v[0]}>{v[1]}" if isinstance(v, list) else v for v in values]
    parts: list[str] = []
    at = 0
    while at < len(plain):
        up, equal = _run(plain, at, 1), _run(plain, at, 0)
        if max(up, equal) > 3:
            parts.append(
                f"{plain[at]}..{plain[at + up - 1]}" if up >= equal else f"{plain[at]} x {equal}"
            )
        else:
            parts.append(str(plain[at]))
        at += max(up, equal) if max(up, equal) > 3 else 1
    if len(parts) > 40 and not full:
        parts = [*parts[:30], f"... {len(parts) - 36} more ...", *parts[-6:]]
    return f"[{', '.join(parts)}]"


def _run(values: list[Any], at: int, step: int) -> int:
    """How many values from `at` on rise by `step`."""
    end = at + 1
    while (
        end < len(values)
        and isinstance(values[end], int)
        and isinstance(values[end - 1], int)
        and values[end] == values[end - 1] + step
    ):
        end += 1
    return end - at
