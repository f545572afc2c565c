"""`lab show`: one cell, step by step, for finding out why it is red: the acts, the plan of every
step, the page tables, and every row against its answer. A cell of the engine ends with its
findings."""

import sys
from dataclasses import asdict, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.attention import select
from lockstep.lab.attention_harness import AttentionHarness, Setting, cell_inputs, distance
from lockstep.lab.cells import ENGINE, Cell, refusal
from lockstep.lab.document import render
from lockstep.lab.engine_harness import EngineHarness, InstrumentedEngine
from lockstep.lab.options import FULL, RunOptions
from lockstep.lab.oracle import Answer
from lockstep.lab.recipes import Act, Compute
from lockstep.plan.build import build
from lockstep.plan.step import Group, StepPlan
from lockstep.sched.request import ScheduledStep
from lockstep.types import Layout, RuleError

MOST = 40  # longer arrays are shortened unless requested in full


class Watched(AttentionHarness):
    """Records its plans and compares every row as soon as it is computed."""

    def watch(self, answers: list[list[Answer]]) -> list[dict[str, Any]]:
        """Plays the whole story and returns its steps; an error of the code under test is added
        last."""
        self.answers, self.told = answers, list[dict[str, Any]]()
        try:
            self.run()
        except Exception as error:  # a broken backend may raise anything, which is shown
            self.told[-1]["error"] = f"{type(error).__name__}: {error}"
        return self.told

    def _play(self, acts: tuple[Act, ...]) -> None:
        words = [{"act": type(a).__name__, **asdict(a)} for a in acts] or [{"act": "nothing"}]
        self.told.append({"step": len(self.told), "acts": words, "launches": []})
        super()._play(acts)

    def plan(self, computes: list[Compute], groups: tuple[int, ...]) -> StepPlan:
        plan = super().plan(computes, groups)
        launch = describe(plan, groups, [a.request for a in computes]) | {"rows": []}
        self.told[-1]["launches"].append(launch)
        return plan

    def _launch(self, computes: list[Compute], groups: tuple[int, ...]) -> None:
        self.faults = {}
        super()._launch(computes, groups)
        launch = self.told[-1]["launches"][-1]
        launch["faults"] = self.fault_lines()
        owners = [act.request for act in computes for _ in act.uids]
        rows = list(zip(self.step_uids, owners, launch["arrays"]["positions"], strict=False))
        for g in groups:
            if rows and bool(self.seen[g][self.step_uids].all()):
                for layer in range(len(self.answers[g])):
                    for row, (uid, request, position) in enumerate(rows):
                        place = {"row": row, "token": uid, "request": request, "position": position}
                        launch["rows"].append(place | self._row(g, layer, uid))

    def _row(self, g: int, layer: int, uid: int) -> dict[str, Any]:
        """Compares a token's row in one layer of a group, at its worst heads."""
        answer = self.answers[g][layer]
        have, have_lse = (t[g][layer][uid].double() for t in (self.out, self.lse))
        out = worst_head(distance(have, answer.out[uid]).amax(1), answer.out_tol[uid])
        lse = worst_head(distance(have_lse, answer.lse[uid]), answer.lse_tol[uid])
        return {
            **{"group": g, "layer": layer, "out": out, "lse": lse},
            "used": max(out["used"], lse["used"]),
            "have": have[out["head"]].tolist(),
            "want": answer.out[uid, out["head"]].tolist(),
            "lse_pair": [float(x[lse["head"]]) for x in (have_lse, answer.lse[uid])],
        }


def worst_head(error: Tensor, tolerance: Tensor) -> dict[str, Any]:
    """Returns the head of a row that uses most of its tolerance."""
    used = (error / tolerance).nan_to_num(torch.inf, torch.inf)
    head, values = int(used.argmax()), {"error": error, "tolerance": tolerance, "used": used}
    return {"head": head, **{name: float(value[head]) for name, value in values.items()}}


def story(cell: Cell, options: RunOptions = FULL) -> list[dict[str, Any]]:
    backend = select.load(cell.backend)
    recipe, feature = cell.pair()
    if not recipe.applies_to(feature):
        rule = "a cell's recipe applies to its feature"
        raise RuleError(rule, str(cell), "See `lockstep lab run --list`")
    if reason := refusal(cell, backend, options.device):
        rule = f"backend {cell.backend} supports the cell"
        raise RuleError(rule, f"a refusal: {reason}", "Show the cell on another backend")
    if cell.table is ENGINE:
        return engine_story(cell, options)
    here = feature.on(options.device)
    script, rows, answers = cell_inputs(recipe, here)
    setting = Setting(**vars(options), inspect=True)
    return Watched(here, script, rows, backend, setting).watch(answers)


def engine_story(cell: Cell, options: RunOptions) -> list[dict[str, Any]]:
    """Returns every step of every engine that the recipe starts, and finally what was found."""
    recipe, tiny = cell.pair()
    rig, told = EngineHarness(tiny, select.load(cell.backend), options), list[dict[str, Any]]()
    known: list[InstrumentedEngine] = []

    def see(engine: InstrumentedEngine, step: ScheduledStep) -> None:
        acts: list[dict[str, Any]] = []
        if engine not in known:
            known.append(engine)
            acts.append({"act": "engine", "number": len(known), **asdict(engine.config)})
        for own, cached_len in zip(step.batch.rows, step.cached_lens.tolist(), strict=True):
            piece = {"act": "piece", "request": own.request.arrival, "index": own.request.index}
            rows = {"samples": own.samples, "emitted": len(own.emit)}
            acts.append({**piece, "new_len": own.new_len, "cached_len": cached_len, **rows})
        plan = build(step.kind.specs, step.work)
        names = [request.arrival for request in step.batch.requests]
        launch = describe(plan, step.kind.groups, names) | {"rows": []}
        told.append({"step": len(told), "acts": acts, "launches": [launch]})

    rig.watchers.append(see)
    recipe.play(rig, True)
    acts = [{"act": "end", "found": rig.fault_lines()}]
    return [*told, {"step": len(told), "acts": acts, "launches": []}]


def describe(plan: StepPlan, groups: tuple[int, ...], names: list[int]) -> dict[str, Any]:
    """Returns every array of a plan; `names` identify its requests in the story."""
    told = []
    for g, group in zip(groups, plan.groups, strict=True):
        spec = group.spec
        kind = f"{spec.layout} {spec.heads}/{spec.kv_heads} heads of {spec.d_qk}, {spec.kv_dtype}"
        if spec.window:
            kind += f", window {spec.window}"
        if spec.layout is not Layout.FRESH:
            kind += f", pages of {spec.page_size}"
        page = {"page_size": spec.page_size, "arrays": arrays(group)}
        told.append({"group": g, "spec": kind, **page})
    sizes = {"requests": names, "real": plan.real._asdict(), "bucket": vars(plan.bucket)}
    return {**sizes, "arrays": arrays(plan), "groups": told}


def arrays(value: StepPlan | Group) -> dict[str, Any]:
    every = {f.name: getattr(value, f.name) for f in fields(value)}
    return {name: array.tolist() for name, array in every.items() if isinstance(array, np.ndarray)}


def text(cell: Cell, steps: list[dict[str, Any]], only: int | None) -> str:
    """Renders the story as text (`show.txt.j2`). A single requested step is shown in full."""
    recipe, feature = cell.pair()
    pair = {"recipe": recipe, "feature": feature}
    return render("show.txt", [array], cell=cell, **pair, steps=steps, only=only).rstrip("\n")


def array(values: list[Any], full: bool) -> str:
    """Formats values on one line, with the middle of a long array left out unless `full`."""
    shown: Any = {"threshold": sys.maxsize if full else MOST, "edgeitems": 8, "separator": ","}
    return " ".join(np.array2string(np.array(values), sys.maxsize, **shown).split())
