"""Runs a script on a real backend, through the engine's own steps and in hostile surroundings, and
judges the bits of every token's output.

Every slot that was not written holds NaN, pages are handed out in shuffled order, freed pages are
poisoned again, buffers lie between guard bands, and the memory that a step may change is computed
here from the page tables, by plain arithmetic. `judge` compares a first run with the float64 answer
and with the plain computation of the same tokens (each path alone, whole, cold); then it runs the
script again with other chunks, page sizes, padding and thread counts. `cells` and `show` call it.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.attention.base import Backend
from lockstep.kernels.cpu.threads import limited
from lockstep.kv.pool import Pool
from lockstep.kv.tables import PageTable
from lockstep.lab import oracle, recipes, spoilt
from lockstep.lab.features import Feature
from lockstep.lab.guard import Guarded, Judgement, as_bits, poison, same, shuffle
from lockstep.lab.options import FULL, RunOptions
from lockstep.lab.oracle import Answer, Rows, rounded
from lockstep.lab.recipes import Accept, Act, Compute, Drop, Fork, Recipe, Script
from lockstep.order import attention_order, device_class
from lockstep.plan.bucket import Buckets, pad
from lockstep.plan.step import Group, Ints, PagedGroup, StepPlan
from lockstep.run.kind import ENCODE, GENERATE, StepKind
from lockstep.run.runner import Share, StepDriver
from lockstep.run.step import Step, layout_of
from lockstep.types import Layout

BUCKETS = Buckets(tuple(2**k for k in range(1, 12)))

GroupIds = tuple[int, ...]
Result = tuple[Tensor, Tensor]  # out [n, heads, d_v] and lse [n, heads]
LayerRows = list[list[Rows]]  # q, k, v by group and layer
Memory = dict[tuple[int, int, int], Tensor]  # storage bits, by (group, layer, 0 for K or 1 for V)


@dataclass(frozen=True)
class Setting(RunOptions):
    """How a script is run. No field may change a bit of the result."""

    page_size: int = 16
    pad: bool = False
    threads: int = 2
    seed: int = 1  # of the shuffled page order
    inspect: bool = False  # compare memory before and after every step


class AttentionHarness(Judgement):
    """Pools, page tables and one script, and its outputs by group, layer and token. To the engine's
    steps it is a model without weights: each token's q, k and v are given, and its layers attend
    with them."""

    def __init__(
        self, feature: Feature, script: Script, rows: LayerRows, backend: Backend, setting: Setting
    ) -> None:
        super().__init__()
        self.script, self.rows, self.backend, self.setting = script, rows, backend, setting
        self.ops, self.device = setting.device.ops, setting.device.place
        self.decode, self.encode = feature.decode, feature.encode
        self.specs = feature.groups(setting.page_size)
        kinds = {
            name: StepKind(
                name=name,
                model=self,  # type: ignore[arg-type]
                groups=groups,
                specs=tuple(self.specs[g] for g in groups),
                layer_map=(),
                forward=partial(self._forward, groups),
            )
            for name, groups in ((GENERATE, self.decode), (ENCODE, self.encode))
            if groups
        }
        self.kinds = {kind.groups: kind for kind in kinds.values()}
        n, spare = len(script.parents), 8 * len(script.committed) + 2
        sizes = [  # room for every token twice
            0 if spec.layout is Layout.FRESH else 2 * -(-n // spec.page_size) + spare
            for spec in self.specs
        ]
        self.driver = StepDriver(kinds, sizes, backend)
        self.pages, self.runner = self.driver.page_pools, self.driver.runner
        self.guarded = Guarded(setting.device)
        self.pools = self.runner.pools = [
            Pool(spec, size, self.ops, self.guarded.storage) if size else None
            for spec, size in zip(self.specs, sizes, strict=True)
        ]
        self.runner.arena = self.guarded  # type: ignore[assignment]
        self.runner.checks = setting.checks
        shuffle(self.pages, setting.seed)
        for g, (own, pool) in enumerate(zip(self.pages, self.pools, strict=True)):
            if own is not None and pool is not None:
                own.give = partial(self._give, g, pool, own.give)  # type: ignore[assignment]
        self.tables: dict[int, PageTable] = {}
        self.used: set[tuple[int, int]] = set()  # (group, page) freed at least once
        self.pads: dict[tuple[int, int], list[Result]] = {}  # by group and length of a pad request
        self.results: list[tuple[int, int, Result]] = []  # (group, layer, result) of the last step
        self.step_uids: list[int] = []
        self.computed: dict[str, set[int]] = {}  # uids by how their rows were computed
        self.seen = [torch.zeros(n, dtype=torch.bool) for _ in self.specs]
        self.out = [
            [torch.full((n, s.heads, s.d_v), torch.nan) for _ in s.layers] for s in self.specs
        ]
        self.lse = [[torch.full((n, s.heads), torch.nan) for _ in s.layers] for s in self.specs]

    def run(self) -> None:
        """Plays the whole script and closes the page tables that are still open."""
        with limited(self.setting.threads):
            for step in self.script.steps:
                self._play(step)
            for table in self.tables.values():
                table.close()
        for pool in filter(None, self.pages):
            pool.check()
            lost = pool.num_pages - 1 - pool.free
            self.check("pages", not lost, f"{lost} pages were not returned")

    def _play(self, acts: tuple[Act, ...]) -> None:
        """Applies bookkeeping acts, then launches encoders in one step, other rows in another."""
        for act in acts:
            if isinstance(act, Fork):
                self.tables[act.child] = self.tables[act.request].fork(act.cached_len)
                self.counters["forks"] += 1
            elif isinstance(act, Accept):
                self.tables[act.request].accept(act.cached_len, act.nodes)
                self.counters["accepted_nodes"] += len(act.nodes)
            elif isinstance(act, Drop):
                self.tables.pop(act.request).close()
                self.counters["drops"] += 1
        encoders = [a for a in acts if isinstance(a, Compute) and a.encoder]
        others = [a for a in acts if isinstance(a, Compute) and not a.encoder]
        if encoders:
            self._launch(encoders, self.encode)
        if others or not acts:
            self._launch(others, self.decode)
        for act in others:
            self.tables[act.request].release(act.cached_len + act.keep)

    def plan(self, computes: list[Compute], groups: GroupIds) -> StepPlan:
        """Returns the step's plan, built by the functions that the engine uses."""
        shares = [
            Share(
                request=self.tables.setdefault(act.request, self.driver.request()),
                ids=act.uids,
                cached_len=act.cached_len,
                parents=act.parents,
                emit=act.emit,
                cross_len=self._cross_len(act),
            )
            for act in computes
        ]
        plan = self.driver.plan(self.kinds[groups], shares)
        return pad(plan, BUCKETS.fit(plan)) if self.setting.pad and shares else plan

    def _cross_len(self, act: Compute) -> int:
        return len(self.script.encoder_uids.get(act.request, ()))

    def _depths(self, act: Compute) -> list[int]:
        return [len(self.script.path(uid)) for uid in act.uids]

    def _launch(self, computes: list[Compute], groups: GroupIds) -> None:
        before = self._memory() if self.setting.inspect else {}
        plan = self.compute(computes, groups)
        for g, layer, result in self.results:
            self._note(g, layer, plan, result)
        self._count(plan, computes, groups)
        self._audit(plan, computes, groups)
        if self.setting.inspect:
            self._compare(before, computes, groups)
        if self.setting.inspect and not self.setting.pad:
            pool_pages = tuple(pool.num_pages if (pool := self.pools[g]) else 0 for g in groups)
            self.note("rules", spoilt.unnoticed(plan, pool_pages))
        self.note("guards", self.guarded.damage())
        for act in computes:
            self.tables[act.request].clear_moves()

    def compute(self, computes: list[Compute], groups: GroupIds) -> StepPlan:
        """Runs a step and returns its plan; `results` receives the output of each layer."""
        self.results, self.step_uids = [], [uid for act in computes for uid in act.uids]
        plan = self.plan(computes, groups)
        self.runner.run(plan, self.step_uids, self.kinds[groups])
        return plan

    def _forward(self, groups: GroupIds, ids: Tensor, positions: Tensor, step: Step) -> Tensor:
        index = ids.cpu().long()
        for g, store, handle in zip(groups, step.stores, step.handles, strict=True):
            cross = self.specs[g].layout is Layout.CROSS
            for layer, spec in enumerate(self.specs[g].layers):
                mine = self.rows[g][layer]
                given = (t[index].to(self.device) for t in (mine.q, mine.k, mine.v))
                q, k, v = map(self.guarded.rows, given)
                if cross and groups == self.encode:  # written now, read by decoder steps
                    store.keys(layer, k, v)
                    continue
                keys = store.keys(layer, *((None, None) if cross else (k, v)))
                self.results.append((g, layer, step.attend_keys(q, keys, handle, spec)))
        return positions[:, None]

    def _note(self, g: int, layer: int, plan: StepPlan, result: Result) -> None:
        """Stores a layer's outputs by token; checks recomputed rows and pad rows."""
        uids, where = torch.tensor(self.step_uids, dtype=torch.long), f"group {g} layer {layer}:"
        out, lse = (t.float().cpu() for t in result)
        n, again = len(uids), self.seen[g][uids]
        repeated = same(self.out[g][layer][uids[again]], out[:n][again])
        self.check("repeat", repeated, f"{where} a row computed twice differs")
        self.out[g][layer][uids], self.lse[g][layer][uids] = out[:n], lse[:n]
        finite = bool(torch.isfinite(out[n:]).all())
        self.check("pads", finite, f"{where} a pad row is not finite")
        if finite and "pad" in self.backend.caps.invariances:
            others = self.differing_pads(g, layer, plan, result)
            self.check("pads", not others, f"{where} pad requests {others} differ alone")
        if layer == len(self.specs[g].layers) - 1:
            self.seen[g][uids] = True

    def differing_pads(self, g: int, layer: int, plan: StepPlan, result: Result) -> list[int]:
        """Returns the indices of `plan`'s pad requests whose rows differ from those of the pad
        request computed alone. A decoder's cross group is skipped: its pads see one key that an
        earlier step left in page 0."""
        if self.specs[g].layout is Layout.CROSS:
            return []
        found, ends = [], plan.q_indptr.tolist()
        for i in range(plan.real.requests, plan.bucket.requests):
            mine, length = [t[ends[i] : ends[i + 1]] for t in result], ends[i + 1] - ends[i]
            if length and not all(map(same, mine, self.pad_request(g, length)[layer])):
                found.append(i)
        return found

    def pad_request(self, g: int, length: int) -> list[Result]:
        """Returns every layer's output for a pad request of `length` rows in a step and pages of
        its own: token 0 at positions 0, 1, ..., reading only keys that this step wrote for it."""
        if (g, length) not in self.pads:
            feature = Feature("pad", "one group", (replace(self.specs[g], page_size=1),))
            script, setting = Script(), Setting(checks=False, device=self.setting.device)
            script.extend(script.open(), length)
            alone = AttentionHarness(feature, script, [self.rows[g]], self.backend, setting)
            alone.compute([Compute(0, (0,) * length, cached_len=0, keep=length)], (0,))
            self.pads[g, length] = [result for _, _, result in alone.results]
        return self.pads[g, length]

    def _audit(self, plan: StepPlan, computes: list[Compute], groups: GroupIds) -> None:
        """Checks lengths and emitted rows by the lab's own arithmetic, and the image's arrays."""
        emits, begin = list[int](), 0
        for act in computes:
            last = (len(act.uids) - 1,)
            emits += [begin + row for row in (last if act.emit is None else act.emit)]
            begin += len(act.uids)
        emitted = plan.emit[: plan.real.emits].tolist()
        self.check("plan", emitted == emits, f"emits rows {emitted[:8]}, not {emits[:8]}")
        ends = [max(self._depths(a)) for a in computes]
        crosses = [self._cross_len(a) for a in computes]
        for g, group in zip(groups, plan.groups, strict=True):
            want = crosses if self.specs[g].layout is Layout.CROSS else ends
            have = group.kv_lens.tolist() if isinstance(group, PagedGroup) else want
            fault = f"group {g} has kv_lens {have[:8]}, not {want[:8]}"
            self.check("plan", have[: len(want)] == want, fault)
        specs = tuple(group.spec for group in plan.groups)
        views = layout_of(plan.bucket, specs, self.backend).views(self.guarded.image)
        for own, group in zip(map(vars, views), plan.groups, strict=True):
            given = {**vars(plan), **vars(group)}
            names = own.keys() & given.keys() - {"start"}  # differs in a group without lists
            equal = all(np.array_equal(own[name], given[name]) for name in names)
            self.check("plan", equal, "the image's arrays differ from the plan's")

    def _give(self, g: int, pool: Pool, give: Callable[..., list[int]], pages: list[int]) -> None:
        """Frees pages, and poisons again those that no request holds any more."""
        freed = give(pages)
        poison(pool, freed)
        self.used |= {(g, page) for page in freed}

    def _count(self, plan: StepPlan, computes: list[Compute], groups: GroupIds) -> None:
        """Counts what the step really did: an equality proves nothing if its path was not taken."""
        real = slice(0, plan.real.tokens)
        positions, tails = plan.positions[real], plan.start[real] <= plan.positions[real]
        plain = [a for a in computes if a.parents is None and not a.encoder]
        trees = [a for a in computes if a.parents is not None]
        self.counters.update(
            steps=1,
            empty_steps=not computes,
            rows=plan.real.tokens,
            pad_rows=plan.bucket.tokens - plan.real.tokens,
            batched_steps=len(computes) > 1,
            decode_rows=(plan.new_lens[: plan.real.requests] == 1).sum(),
            prefix_rows=sum(len(a.uids) for a in computes if a.cached_len),
            rejected_rows=sum(len(a.uids) - a.keep for a in plain),
            tail_rows=tails.sum(),
            shallow_ends=sum(self._depths(a)[-1] < max(self._depths(a)) for a in trees),
            infinite_keys=len(set(self.step_uids) & set(self.script.infinite)),
            encoder_rows=sum(len(a.uids) for a in computes if a.encoder),
        )
        for act in (*plain, *trees):
            kinds = {"batch": len(computes) > 1, "prefix": act.cached_len > 0}
            kinds |= {"decode": len(act.uids) == 1, "tree": act.parents is not None}
            for kind in (name for name, holds in kinds.items() if holds):
                self.computed.setdefault(kind, set()).update(act.uids)
        for g, group in zip(groups, plan.groups, strict=True):
            self._count_group(g, group, positions, (plan.start[real][tails], positions[tails]))

    def _count_group(self, g: int, group: Group, positions: Ints, tails: tuple[Ints, Ints]) -> None:
        spec, counters = self.specs[g], self.counters
        chosen = attention_order(device_class(self.ops.machine), spec.d_qk, spec.d_v)
        tile, split = chosen.tile, chosen.splits.begin(1)
        begins, ends = tails
        counters["tails_over_a_tile"] += (begins // tile != ends // tile).sum()
        counters["tails_over_a_split"] += (begins // split != ends // split).sum()
        counters["rows_over_a_split"] += (positions >= split).sum()
        if spec.window is not None:
            counters["rows_beyond_window"] += (positions >= spec.window).sum()
        pool = self.pages[g]
        if isinstance(group, PagedGroup) and pool is not None:
            ids = set(group.page_ids.tolist()) - {0}
            counters["moved_rows"] += len(group.moves)
            counters["dropped_positions"] += group.first_pos.sum()
            counters["shared_pages"] += sum(p < pool.num_pages and pool.refs[p] > 1 for p in ids)
            counters["reused_pages"] += sum((g, p) in self.used for p in ids)

    def _memory(self) -> Memory:
        return {
            (g, layer, which): as_bits(storage).clone()
            for g, pool in enumerate(self.pools)
            for layer, storages in enumerate(pool.storages if pool else ())
            for which, storage in enumerate(storages)
        }

    def _compare(self, before: Memory, computes: list[Compute], groups: GroupIds) -> None:
        """Checks that the step changed exactly the slots it had to, to the values it had to."""
        self.note("writes", [])  # even if nothing is cached
        expected = {g: self._expected_writes(g, computes) for g in groups}
        after = self._memory()
        for (g, layer, which), old in before.items():
            spec, rows, expect = self.specs[g], self.rows[g][layer], expected.get(g, {})
            attn, new = spec.layers[layer], after[g, layer, which]
            values, scale = ((rows.k, attn.k_scale), (rows.v, attn.v_scale))[which]
            where = f"group {g} layer {layer}:"
            changed = (old != new).flatten(1).any(1)
            changed[: spec.page_size] = False
            extra = set(changed.nonzero().flatten().tolist()) - set(expect)
            self.check("writes", not extra, f"{where} slots {sorted(extra)[:4]} changed")
            columns = F.pad(values[list(expect.values())].float(), (0, -values.shape[2] % 8))
            want = rounded(spec.kv_dtype, columns, scale, self.setting.device)  # as stored
            right = torch.equal(new[list(expect)].cpu(), as_bits(want))
            self.check("writes", right, f"{where} a row has a wrong slot or wrong bytes")

    def _expected_writes(self, g: int, computes: list[Compute]) -> dict[int, int]:
        """Maps each slot that a step may write to its token, by arithmetic on the tables."""
        spec, out = self.specs[g], dict[int, int]()
        for act in computes:
            pages = self.tables[act.request].pages(g)
            if pages is None or (spec.layout is Layout.CROSS and not act.encoder):
                continue
            begin, first, size = act.cached_len, pages.first_pos, spec.page_size
            slot = partial(slot_of, pages.page_ids.tolist(), first, size)
            if not act.encoder and spec.layout is not Layout.CROSS:
                # moves may just have written any of these positions whose pages are still held
                path = self.script.path(act.uids[0])[:begin]
                kept = range(max(first, begin - size - 8), begin)
                out |= {slot(p): path[p] for p in kept}
            if act.parents is not None:
                begin = len(act.parents) - len(act.uids)
                slot = partial(slot_of, pages.scratch.tolist(), 0, size)
            out |= {slot(begin + i): uid for i, uid in enumerate(act.uids)}
        return out

    def differing_rows(self, want: "AttentionHarness", tokens: set[int] | None) -> list[str]:
        """Describes rows of `tokens` (None: all) whose bits differ; a NaN equals nothing."""
        found = []
        for g, seen in enumerate(self.seen):
            both = seen & want.seen[g]
            if tokens is not None:
                both &= torch.tensor([uid in tokens for uid in range(len(both))])
            for layer in range(len(self.out[g])):
                for name, a, b in (("out", self.out, want.out), ("lse", self.lse, want.lse)):
                    x, y = a[g][layer][both], b[g][layer][both]
                    off = ((as_bits(x) != as_bits(y)) | x.isnan()).flatten(1).any(1)
                    if bool(off.any()):
                        count, first = int(off.sum()), int(both.nonzero()[off][0])
                        rows = f"{count} of {len(off)} rows differ in {name}, first token {first}"
                        found.append(f"group {g} layer {layer}: {rows}")
        return found


def slot_of(page_ids: list[int], first_pos: int, page_size: int, position: int) -> int:
    """Returns the slot of the key at `position`, by plain arithmetic."""
    page = page_ids[(position - first_pos) // page_size]
    return page * page_size + position % page_size


@lru_cache(maxsize=64)
def cell_inputs(recipe: Recipe, feature: Feature) -> tuple[Script, LayerRows, list[list[Answer]]]:
    """Returns a cell's script, q/k/v and float64 answers, which all backends share."""
    script, device = recipes.write(recipe, feature), feature.device
    rows = oracle.values(feature.groups(16), len(script.parents), dtype=device.compute)
    rows = oracle.overflowed(rows, script.infinite)
    return script, rows, oracle.answers(feature, script, rows, device.unit)


def judge(
    recipe: Recipe, feature: Feature, backend: Backend, options: RunOptions = FULL
) -> Judgement:
    """Runs one cell and returns what was found. Raises only what the code under test raises."""
    cell = AttentionCell(recipe, feature, backend, options)
    main = cell.run(cell.script, inspect=True)
    cell.counters = Counter({name: int(count) for name, count in main.counters.items()})
    cell.judge_values(main)
    cell.require(recipe.required_counters)
    padded = cell.run(cell.script, inspect=True, pad=True)
    if not padded.counters["pad_rows"] and main.counters["rows"]:
        cell.note("paths", ["pad_rows is 0 in the padded run"])
    if backend.caps.invariances:
        cell.judge_bits(main, padded, options.quick)
    return cell


class AttentionCell(Judgement):
    """A recipe on a feature, run in every way that must not change a bit."""

    def __init__(
        self, recipe: Recipe, feature: Feature, backend: Backend, options: RunOptions
    ) -> None:
        super().__init__()
        self.feature, self.backend = feature.on(options.device), backend
        self.script, self.rows, self.answers = cell_inputs(recipe, self.feature)
        self.setting = Setting(**vars(options))

    def run(self, story: Script, **setting: Any) -> AttentionHarness:
        how = replace(self.setting, **setting)
        harness = AttentionHarness(self.feature, story, self.rows, self.backend, how)
        harness.run()
        for name, faults in harness.faults.items():
            self.note(name, faults, "in every step of every run")
        return harness

    def judge_values(self, main: AttentionHarness) -> None:
        """Compares outputs with float64, within tolerance; NaN: an unwritten slot was read."""
        errors = {"value": 0.0, "lse": 0.0}
        for g, layers in enumerate(self.answers):
            seen = main.seen[g]
            for layer, answer in enumerate(layers):
                where = f"group {g} layer {layer}:"
                for name, have, want, tol in (
                    ("value", main.out[g][layer], answer.out, answer.out_tol[..., None]),
                    ("lse", main.lse[g][layer], answer.lse, answer.lse_tol),
                ):
                    off = distance(have[seen].double(), want[seen])
                    shares = (off / tol[seen]).nan_to_num(torch.inf, torch.inf)
                    error, used = (float(t.max()) if t.numel() else 0.0 for t in (off, shares))
                    errors[name] = max(errors[name], error)
                    self.tolerance_used = max(self.tolerance_used, used)
                    fault = f"{where} off by {error:.3g}, {used:.3g} of the tolerance"
                    self.check(name, used <= 1, fault, f"max error {errors[name]:.3g}")
                    finite = not bool(have[seen].isnan().any())
                    self.check("poison", finite, f"{where} NaN in {name}")
        self.out_error, self.lse_error = errors["value"], errors["lse"]

    def judge_bits(self, main: AttentionHarness, padded: AttentionHarness, quick: bool) -> None:
        """Compares the recipe, and every other way to run it, with the plain computation."""
        script, want = self.script, self.run(recipes.plain(self.script), seed=5)

        def compare(
            name: str, told: str, *runs: AttentionHarness, tokens: set[int] | None = None
        ) -> None:
            if ("batch" if name == "alone" else name) in self.backend.caps.invariances:
                for run in runs:
                    self.note(name, run.differing_rows(want, tokens), told)

        for kind, tokens in sorted(main.computed.items()):
            told = f"{len(tokens)} rows equal the plain computation"
            compare(kind, told, main, tokens=tokens)
        if not self.feature.fresh:
            cut = recipes.chunked(script, 7)
            if len(cut.steps) > len(script.steps):
                told = f"{len(cut.steps)} steps instead of {len(script.steps)}"
                compare("chunk", told, self.run(cut))
            sizes = (1, 64) if quick else (1, 2, 64)
            paged = [self.run(script, page_size=size) for size in sizes]
            compare("page", f"page sizes {sizes}", *paged)
        compare("pad", f"{padded.counters['pad_rows']} pad rows", padded)
        compare("threads", "1 and 2 threads", self.run(script, threads=1))
        if not quick:
            each = [self.run(recipes.alone(script, r)) for r in script.lineage]
            compare("alone", f"{len(each)} requests by themselves", *each)


def distance(have: Tensor, want: Tensor) -> Tensor:
    """Returns absolute distances, infinite where a value is NaN."""
    distance = torch.where(have == want, 0.0, (have - want).abs())
    return distance.nan_to_num(nan=torch.inf, posinf=torch.inf)
