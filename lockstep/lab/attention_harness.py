"""Runs a script on a real backend, through the engine's own functions, in the most hostile
surroundings.

Every slot that was not written holds NaN, pages are handed out in a shuffled order, freed pages are
poisoned again, buffers lie between guard bands, and what a step may change in memory is computed
here from the tables, by plain arithmetic, and compared byte by byte. A world runs one script in one
`Setting`; it records, for every token, the bits of its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.attention.base import Backend
from lockstep.kernels.cpu.threads import limited
from lockstep.kv import pool as kv_pool
from lockstep.kv.pages import PagePool
from lockstep.kv.pool import Pool
from lockstep.kv.tables import Table
from lockstep.lab import spoilt
from lockstep.lab.features import Feature
from lockstep.lab.guard import CANARY, Guarded, as_bits, same
from lockstep.lab.options import CPU, Device
from lockstep.lab.oracle import KINDS, LARGEST, Rows
from lockstep.lab.pads import PadRows
from lockstep.lab.script import Accept, Act, Compute, Drop, Fork, Script
from lockstep.order import split_len, tile_len
from lockstep.plan import bucket as plan_bucket
from lockstep.plan import build as plan_build
from lockstep.plan import check as plan_check
from lockstep.plan import image as plan_image
from lockstep.plan import tree as plan_tree
from lockstep.plan.step import PagedGroup, StepPlan
from lockstep.run import step
from lockstep.types import GroupSpec, Layout

BUCKETS = plan_bucket.Buckets(tuple(2**k for k in range(1, 12)))


@dataclass(frozen=True)
class Setting:
    """How a script is run; none of this may change a bit."""

    page_size: int = 16
    pad: bool = False
    threads: int = 2
    seed: int = 1  # of the page order
    checks: bool = True
    device: Device = CPU
    inspect: bool = False  # compare memory before and after every step


@dataclass(eq=False)
class Record:
    """What a run left: per group and layer the outputs by token, what was counted, and what was
    found wrong."""

    out: list[list[Tensor]]
    lse: list[list[Tensor]]
    seen: list[Tensor]
    kinds: dict[str, set[int]] = field(default_factory=dict)  # tokens by how their row was computed
    counters: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)


class AttentionHarness:
    """Pools, tables and one script."""

    def __init__(
        self,
        feature: Feature,
        script: Script,
        rows: list[list[Rows]],
        backend: Backend,
        setting: Setting,
    ) -> None:
        self.feature, self.script, self.rows = feature, script, rows
        self.backend, self.setting = backend, setting
        self.device = setting.device.place
        self.specs = feature.groups(setting.page_size)
        self.guarded = Guarded(setting.device)
        sizes = [self._pool_pages(spec) for spec in self.specs]
        self.pages = [PagePool(n) if n else None for n in sizes]
        self.pools = [
            Pool(spec, n, setting.device.ops, self.guarded.storage) if n else None
            for spec, n in zip(self.specs, sizes, strict=True)
        ]
        for g, pool in enumerate(self.pages):
            if pool is not None:
                np.random.default_rng(setting.seed + 17 * g).shuffle(pool._free)
        self.pads = PadRows(self.specs, rows, backend, setting.device)
        self.tables: dict[int, Table] = {}
        self.used: set[tuple[int, int]] = set()  # (group, page) that somebody has given back
        n = len(script.parents)
        self.record = Record(
            [[torch.full((n, s.heads, s.d_v), torch.nan) for _ in s.layers] for s in self.specs],
            [[torch.full((n, s.heads), torch.nan) for _ in s.layers] for s in self.specs],
            [torch.zeros(n, dtype=torch.bool) for _ in self.specs],
        )

    def run(self) -> Record:
        """Plays the whole script and closes what is still open."""
        with limited(self.setting.threads):
            for step in self.script.steps:
                self._play(step)
            for table in self.tables.values():
                self._freed(table.close())
        for pool in filter(None, self.pages):
            pool.check()
            if pool.free != pool.num_pages - 1:
                self.record.faults.append(
                    f"pages: {pool.num_pages - 1 - pool.free} never came back"
                )
        return self.record

    def _play(self, acts: tuple[Act, ...]) -> None:
        """Bookkeeping acts first, then one launch for the encoders and one for everything else."""
        for act in acts:
            if isinstance(act, Fork):
                self.tables[act.child] = self.tables[act.request].fork(act.cached_len)
                self.record.counters["forks"] += 1
            elif isinstance(act, Accept):
                self.tables[act.request].accept(act.cached_len, act.nodes)
                self.record.counters["accepted_nodes"] += len(act.nodes)
            elif isinstance(act, Drop):
                self._freed(self.tables.pop(act.request).close())
                self.record.counters["drops"] += 1
        computes = [a for a in acts if isinstance(a, Compute)]
        encoders = [a for a in computes if a.encoder]
        others = [a for a in computes if not a.encoder]
        if encoders:
            self._launch(encoders, self.feature.encode)
        if others or not acts:
            self._launch(others, self.feature.decode)
        for act in others:
            self._freed(self.tables[act.request].release(act.cached_len + act.keep))

    def plan(self, computes: list[Compute], groups: tuple[int, ...]) -> StepPlan:
        """The step's plan, from the same functions the engine uses."""
        works = []
        for act in computes:
            table = self.tables.setdefault(act.request, Table(self.specs, self.pages))
            cross = len(self.script.encoder_uids.get(act.request, ()))
            if act.encoder:
                table.reserve(0, cross_len=cross)
            elif act.parents is not None:
                depth = max(len(p) for p in plan_tree.paths(act.parents, len(act.parents)))
                table.reserve(act.cached_len + depth, len(act.parents), cross)
            else:
                table.reserve(act.cached_len + len(act.uids), cross_len=cross)
            pages = tuple(table.pages(g) for g in groups)
            new = len(act.uids) if act.encoder else 0
            works.append(
                plan_build.Work(
                    act.cached_len, len(act.uids), pages, act.emit, act.parents, cross, new
                )
            )
        plan = plan_build.build([self.specs[g] for g in groups], works)
        return plan_bucket.pad(plan, BUCKETS.fit(plan)) if self.setting.pad and works else plan

    def _launch(self, computes: list[Compute], groups: tuple[int, ...]) -> None:
        plan = self.plan(computes, groups)
        pool_pages = tuple(pool.num_pages if (pool := self.pools[g]) else 0 for g in groups)
        if self.setting.checks:
            plan_check.check(plan, pool_pages)
        if self.setting.inspect and not self.setting.pad:
            found = spoilt.unnoticed(plan, pool_pages)
            self.record.faults += [f"rules: {fault}" for fault in found]
        self._count(plan, computes, groups)
        self._audit(plan, computes, groups)
        specs = tuple(self.specs[g] for g in groups)
        uids = [uid for act in computes for uid in act.uids]
        layout = step.layout_of(plan, self.backend)
        image = np.full(layout.length, CANARY[4], np.int32)  # `lower` writes all that is read
        variants = step.lower(plan, uids, self.backend, layout, image)
        views = layout.views(self.guarded.ints(image))
        if not np.array_equal(
            plan_image.pack(plan_image.unpack(image, layout)), plan_image.pack(plan)
        ):
            self.record.faults.append("plan: unpack(image) is another plan")
        before = self._memory() if self.setting.inspect else None
        pools = [self.pools[g] for g in groups]
        bound = step.bind(layout, views, variants, self.backend, pools, ())
        bound.relocate()
        for at, g in enumerate(groups):
            stores, handle = bound.stores[at], bound.handles[at]
            for layer in range(len(specs[at].layers)):
                self._layer(g, layer, (plan, stores, handle), uids)
        if before is not None:
            self._compare(before, computes, groups)
        self.record.faults += self.guarded.damage()
        for act in computes:
            self._freed(self.tables[act.request].moved())

    def _layer(
        self,
        g: int,
        layer: int,
        step: tuple[StepPlan, kv_pool.KvWriter | kv_pool.UncachedKv, object],
        uids: list[int],
    ) -> None:
        plan, stores, handle = step
        spec, mine, record = self.specs[g], self.rows[g][layer], self.record
        index = torch.tensor(uids + [0] * (plan.bucket.tokens - len(uids)), dtype=torch.long)
        q, k, v = (self.guarded.rows(t[index].to(self.device)) for t in (mine.q, mine.k, mine.v))
        reads_only = spec.layout is Layout.CROSS and not any(map(len, plan_writes(plan, spec)))
        keys = stores.keys(layer, *((None, None) if reads_only else (k, v)))
        if spec.layout is Layout.CROSS and not reads_only:
            return  # the encoder's step writes the decoder's cross keys and asks nothing of them
        result = self.backend.attend(q, keys, handle, spec.layers[layer])
        out, lse = (t.float().cpu() for t in result)
        real = index[: len(uids)]
        again = record.seen[g][real] if layer == 0 else torch.zeros(0, dtype=torch.bool)
        if again.any() and not same(record.out[g][layer][real[again]], out[: len(uids)][again]):
            record.faults.append(f"repeat: group {g}: a row computed twice differs")
        record.out[g][layer][real], record.lse[g][layer][real] = out[: len(uids)], lse[: len(uids)]
        if not bool(torch.isfinite(out[len(uids) :]).all()):
            record.faults.append(f"pads: group {g}: a pad row is not finite")
        elif "pad" in self.backend.caps.invariances:
            for i in self.pads.differing(g, layer, plan, result):
                what = f"request {i} of the plan is not the pad request alone"
                record.faults.append(f"pads: group {g} layer {layer}: {what}")
        if layer == len(spec.layers) - 1:
            record.seen[g][real] = True

    def _audit(self, plan: StepPlan, computes: list[Compute], groups: tuple[int, ...]) -> None:
        """What the plan says of lengths and emitted rows, by the lab's own arithmetic."""
        begins = np.cumsum([0, *(len(a.uids) for a in computes)])
        emits = [
            int(begins[i]) + j
            for i, a in enumerate(computes)
            for j in (a.emit if a.emit is not None else (len(a.uids) - 1,))
        ]
        if plan.emit[: plan.real.emits].tolist() != emits:
            self.record.faults.append(f"plan: emits rows {plan.emit.tolist()[:8]}, not {emits[:8]}")
        ends = [max(len(self.script.path(u)) for u in a.uids) for a in computes]
        crosses = [len(self.script.encoder_uids.get(a.request, ())) for a in computes]
        for at, g in enumerate(groups):
            group, want = plan.groups[at], crosses if self.specs[g].layout is Layout.CROSS else ends
            if (
                isinstance(group, PagedGroup)
                and group.kv_lens[: plan.real.requests].tolist() != want
            ):
                self.record.faults.append(
                    f"plan: group {g} has kv_lens {group.kv_lens.tolist()[:8]}, not {want[:8]}"
                )

    def _pool_pages(self, spec: GroupSpec) -> int:
        """Room for every token of the script twice, and the sink; 0 for a fresh group."""
        if spec.layout is Layout.FRESH:
            return 0
        return (
            2 * -(-len(self.script.parents) // spec.page_size) + 8 * len(self.script.committed) + 2
        )

    def _freed(self, freed: list[list[int]]) -> None:
        """Pages that nobody holds any more are poisoned again."""
        for g, pages in enumerate(freed):
            pool = self.pools[g]
            if pool is not None and pages:
                size = self.specs[g].page_size
                slots = (torch.tensor(pages)[:, None] * size + torch.arange(size)).reshape(-1)
                slots = slots.to(self.device)
                for storage in (s for layer in pool.storages for s in layer):
                    self.guarded.poison(storage, slots)
                self.record.counters["freed_pages"] += len(pages)
                self.used |= {(g, p) for p in pages}

    def _count(self, plan: StepPlan, computes: list[Compute], groups: tuple[int, ...]) -> None:
        """What the step really was: each equality is only worth something if its path was taken."""
        count = self.record.counters
        real = slice(0, plan.real.tokens)
        tails = plan.start[real] <= plan.positions[real]
        count["steps"] += 1
        count["empty_steps"] += not computes
        count["rows"] += plan.real.tokens
        count["pad_rows"] += plan.bucket.tokens - plan.real.tokens
        count["batched_steps"] += len(computes) > 1
        count["decode_rows"] += int((plan.new_lens[: plan.real.requests] == 1).sum())
        count["prefix_rows"] += sum(len(a.uids) for a in computes if a.cached_len)
        count["rejected_rows"] += sum(
            len(a.uids) - a.keep for a in computes if a.parents is None and not a.encoder
        )
        count["tail_rows"] += int(tails.sum())
        count["shallow_ends"] += sum(self._shallow(a) for a in computes if a.parents is not None)
        count["infinite_keys"] += len(
            {u for a in computes for u in a.uids} & set(self.script.infinite)
        )
        self._sort(plan, computes)
        count["encoder_rows"] += sum(len(a.uids) for a in computes if a.encoder)
        for at, g in enumerate(groups):
            spec, group = self.specs[g], plan.groups[at]
            tile, split = tile_len(spec.d_qk, spec.d_v), split_len(spec.d_qk, spec.d_v)
            last, first = plan.positions[real][tails], plan.start[real][tails]
            count["tails_over_a_tile"] += int((first // tile != last // tile).sum())
            count["tails_over_a_split"] += int((first // split != last // split).sum())
            count["rows_over_a_split"] += int((plan.positions[real] >= split).sum())
            if spec.window is not None:
                count["rows_beyond_window"] += int((plan.positions[real] >= spec.window).sum())
            if isinstance(group, PagedGroup):
                self._count_pages(g, group)

    def _shallow(self, act: Compute) -> bool:
        """Whether a tree's last row is not its deepest."""
        depths = [len(self.script.path(uid)) for uid in act.uids]
        return depths[-1] < max(depths)

    def _sort(self, plan: StepPlan, computes: list[Compute]) -> None:
        """Which rows were batched, had a prefix, were decoded, hung in a tree."""
        for act in (a for a in computes if not a.encoder):
            held = {
                "batch": len(computes) > 1,
                "prefix": act.cached_len > 0,
                "decode": len(act.uids) == 1,
                "tree": act.parents is not None,
            }
            for kind in (k for k, holds in held.items() if holds):
                self.record.kinds.setdefault(kind, set()).update(act.uids)

    def _count_pages(self, g: int, group: PagedGroup) -> None:
        count, pool = self.record.counters, self.pages[g]
        count["moved_rows"] += len(group.moves)
        count["dropped_positions"] += int(group.first_pos.sum())
        ids = set(group.page_ids.tolist()) - {0}
        count["shared_pages"] += sum(
            1 for p in ids if pool is not None and p < pool.num_pages and pool.refs[p] > 1
        )
        count["reused_pages"] += sum((g, p) in self.used for p in ids)

    def _memory(self) -> list[list[list[Tensor]]]:
        return [
            [[kv_pool._bits(s).clone() for s in layer] for layer in pool.storages] if pool else []
            for pool in self.pools
        ]

    def _compare(
        self, before: list[list[list[Tensor]]], computes: list[Compute], groups: tuple[int, ...]
    ) -> None:
        """The step changed the slots it had to, to the values it had to, and nothing else."""
        for g, pool in enumerate(self.pools):
            if pool is None:
                continue
            expect = self._expected_writes(g, computes) if g in groups else {}
            slots = torch.tensor(list(expect), dtype=torch.long, device=self.device)
            uids = torch.tensor(list(expect.values()), dtype=torch.long)
            for layer, storages in enumerate(pool.storages):
                for at, storage in enumerate(storages):
                    old, new = before[g][layer][at], kv_pool._bits(storage)
                    changed = (as_bits(old) != as_bits(new)).flatten(1).any(1)
                    changed[: pool.spec.page_size] = False
                    extra = set(changed.nonzero().flatten().tolist()) - set(expect)
                    if extra:
                        self.record.faults.append(
                            f"writes: group {g} layer {layer}: slots {sorted(extra)[:4]} changed"
                        )
                    rows = self.rows[g][layer]
                    want = stored_bits(pool.spec, layer, (rows.k if at == 0 else rows.v)[uids], at)
                    if len(slots) and not torch.equal(as_bits(new[slots]).cpu(), as_bits(want)):
                        self.record.faults.append(
                            f"writes: group {g} layer {layer}: a row is not where or what it "
                            "should be"
                        )

    def _expected_writes(self, g: int, computes: list[Compute]) -> dict[int, int]:
        """slot -> token that lies there after this step, by plain arithmetic on the tables."""
        spec, out = self.specs[g], {}
        for act in computes:
            pages = self.tables[act.request].pages(g)
            if pages is None or (spec.layout is Layout.CROSS and not act.encoder):
                continue
            places = list(range(act.cached_len, act.cached_len + len(act.uids)))
            ids, first = pages.page_ids.tolist(), pages.first_pos
            if act.parents is not None:
                places, ids, first = (
                    list(range(len(act.parents) - len(act.uids), len(act.parents))),
                    pages.scratch.tolist(),
                    0,
                )
            for place, uid in zip(places, act.uids, strict=True):
                out[
                    ids[(place - first) // spec.page_size] * spec.page_size + place % spec.page_size
                ] = uid
            if not act.encoder:
                out |= self._committed_slots(spec, pages, act)
        return out

    def _committed_slots(
        self, spec: GroupSpec, pages: plan_build.Pages, act: Compute
    ) -> dict[int, int]:
        """Committed tokens that moves may have put in place just now: all that are still held."""
        path = self.script.path(act.uids[0])[: act.cached_len]
        if spec.layout is Layout.CROSS or not path:
            return {}
        held = range(max(pages.first_pos, len(path) - spec.page_size - 8), len(path))
        ids, size = pages.page_ids.tolist(), spec.page_size
        return {ids[(p - pages.first_pos) // size] * size + p % size: path[p] for p in held}


def plan_writes(plan: StepPlan, spec: GroupSpec) -> Iterator[np.ndarray]:
    """The write slots of the groups with this spec."""
    return (g.write_slots for g in plan.groups if isinstance(g, PagedGroup) and g.spec == spec)


def stored_bits(spec: GroupSpec, layer: int, values: Tensor, which: int) -> Tensor:
    """What the cache holds for these values, up to a multiple of 8 columns with zeros: the lab's
    own account, not the pool's."""
    attn = spec.layers[layer]
    values = F.pad(values.float(), (0, -values.shape[2] % 8))
    scaled = values / (attn.k_scale if which == 0 else attn.v_scale)
    if spec.kv_dtype in LARGEST:
        scaled = scaled.clamp(-LARGEST[spec.kv_dtype], LARGEST[spec.kv_dtype])
    return scaled.to(KINDS[spec.kv_dtype])
