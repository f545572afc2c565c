"""Runs steps: pad, check, lower, load, launch. One path; a launch is plain, or recorded and, when
its signature occurs again, replayed into the memory that it returned. Knows the pools, the backend
and a model's step kinds; only `StepDriver` knows requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.kernels.cpu.threads import TapeMemory, address_of, setting
from lockstep.kv.pool import Pool
from lockstep.kv.tables import CacheGroups, PagePool, PageTable
from lockstep.ops import Ops, concat, copies_with_numpy, to_device, unmarked_operations
from lockstep.plan.bucket import RECORDED_ROWS, Buckets, pad
from lockstep.plan.build import NO_MOVES, RequestPages, RequestWork, build, paths
from lockstep.plan.check import check
from lockstep.plan.image import ImageLayout, PlanArrays
from lockstep.plan.step import Bucket, Ints, PagedGroup, Real, StepPlan, ints
from lockstep.run.graph import Graph, Studio, captures
from lockstep.run.kind import DRAFTS, ENCODE, GENERATE, VERIFY, Kinds, StepKind, group_specs
from lockstep.run.step import Arena, Step, Variants, bind, handles_of, layout_of, lower
from lockstep.run.tape import Tape
from lockstep.sample.formulas import FLOATS, INTS
from lockstep.sample.sampler import Settings
from lockstep.types import GroupSpec, Layout, RuleError

IMAGE_LEN = 1 << 22  # int32 of a step's image: 16 MB
LAYOUTS = 512  # cached layouts: chains of several lengths, with any number of pages
GUESSES = 1 << 16  # most samples that the next step may read; draft tokens to verify follow them
SAMPLES = 2 * GUESSES
SETTING = 2 * (FLOATS + INTS)  # int32 numbers of one row's settings
Ids = Sequence[int] | Ints | Tensor
Guess = tuple[Tensor, Tensor]  # [S] each: tokens and their log-probabilities
CAPTURES = 2  # tries to capture a launch for which memory was lacking; then it runs plainly
# CPU recording: plain launches of a signature before one is recorded, at three times the cost
# (other kinds: after 1), and most signatures counted; most tapes kept, and roughly their bytes
STEADY, SEEN = {GENERATE: 3}, 1024
TAPES, TAPE_BYTES = 64, 1 << 28
# how a launch ran: plainly, as it always will; plainly or recorded, to be replayed later; replayed
PLAIN, COLD, REPLAYED = range(3)


class StepOutput(NamedTuple):
    """The results of a step for its T real rows."""

    rows: Tensor  # [T, d] hidden states
    emitted: Tensor  # [S, d] of the rows that the plan emits
    states: Any = None  # [T, n * d] after its n `hidden_layers`; numpy for float32 on a CPU
    logits: Tensor | None = None  # [S, vocab] of emitted rows, if settings were given
    sampled: tuple[Tensor, Tensor] | None = None  # int64 [S] each: their tokens and sampler states
    next_hidden: Tensor | None = None  # [S, d] for a draft: the state that the next rows read
    guesses: tuple[Guess, ...] = ()  # of a chain with a plan

    def without_pads(self, real: Real) -> StepOutput:
        """Returns the output without the rows of pads."""
        if (self.rows.shape[0], self.emitted.shape[0]) == (real.tokens, real.emits):
            return self
        out = self._replace(rows=self.rows[: real.tokens], emitted=self.emitted[: real.emits])
        if self.logits is not None:
            out = out._replace(logits=self.logits[: real.emits])
        if self.next_hidden is not None:
            out = out._replace(next_hidden=self.next_hidden[: real.emits])
        return out


class BoundRows(NamedTuple):
    """A step's rows on the device, and the sampler settings of its emitted rows, if any."""

    kind: StepKind
    ids: Tensor
    positions: Tensor
    arrays: PlanArrays
    step: Step
    how: Settings | None


class Chain(NamedTuple):
    """The draft tokens that a launch generates after those that it samples: `guesses` in all, those
    after the first by steps of a kind. `plan` has the last row of each request and advances from
    step to step (`Step.advance`); the caller has checked a plan of all these rows. Without one (all
    requests must have equally many rows), all rows are computed again for each draft token."""

    kind: StepKind
    guesses: int
    plan: StepPlan | None = None


class Part(NamedTuple):
    """One step of a launch in the arena: its image, then the settings of its sampler, if any."""

    kind: StepKind
    layout: ImageLayout
    variants: Variants
    place: slice
    cuts: bool | None


@dataclass(frozen=True)
class Signature:
    """All that a launch depends on besides the numbers in the arena, the weights and the cache."""

    buckets: tuple[Bucket, ...]  # of its steps
    kind: StepKind  # of the first
    variants: tuple[Variants, ...]
    addresses: tuple[int, ...]  # of the image and of a planner's buffers
    threads: tuple[int, ...]  # CPU kernels' thread setting, torch's inference mode
    cuts: bool | None = None  # whether the sampler cuts; None: no sampler
    chain: Chain | None = None

    @property
    def bucket(self) -> Bucket:
        return self.buckets[0]

    @property
    def step_name(self) -> str:
        """Its kind; `verify` where the target samples several rows of every request."""
        several = self.bucket.width > 1 and self.bucket.emits == self.bucket.tokens
        return VERIFY if self.kind.name == GENERATE and several else self.kind.name


class Runner:
    """The groups of an engine and their pools, on a device. A step uses those of its kind."""

    # plans are checked before they run; the lab turns it off to see which other check fails
    checks = True

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        pages: Sequence[int],
        backend: Backend,
        ops: Ops,
        buckets: Buckets | None = None,
        graphs: bool = False,
        overlap: bool = False,
        every: bool = True,
    ) -> None:
        """With `graphs`, launches that `captures` accepts are recorded, on a CPU once they recur.
        With `every`, a CPU records each launch the first time."""
        if graphs and not backend.caps.graphs:
            rule = "launches are recorded with a backend that states `graphs`"
            got = f"{type(backend).__module__}, which does not"
            raise RuleError(rule, got, "Leave `graphs` out, or use another backend")
        if graphs and (missed := unmarked_operations(ops)):
            rule = "every operation of a recorded launch is marked"
            raise RuleError(rule, f"{', '.join(missed)} are not", "Take it from kernels.select")
        self.specs, self.backend, self.buckets = tuple(specs), backend, buckets
        stored = [(s, n, s.layout is not Layout.FRESH) for s, n in zip(specs, pages, strict=True)]
        self.pools = [Pool(spec, n, ops) if stores else None for spec, n, stores in stored]
        self.arena, self.graphs, self.ops = Arena(IMAGE_LEN, ops.device), graphs, ops
        self.studio = Studio() if graphs and ops.device.type == "cuda" else None
        # samples of the step before, for rows whose id is -1 - k: sample k
        room = SAMPLES if overlap else 0
        self.sampled = torch.zeros(room, dtype=torch.int64, device=ops.device)
        # for a chain's launch: rows from the planned emitted row to the actual one
        self.shift = torch.zeros(min(room, GUESSES), dtype=torch.int32, device=ops.device)
        self.tapes: dict[Signature, Tape | Graph] = {}
        self.every, self._room = every and self.studio is None, TapeMemory()
        self.warmth = PLAIN  # of the last launch: PLAIN, COLD or REPLAYED
        self._seen = Counter[Signature]()  # occurrences of launches that a CPU has not recorded
        self._failed = Counter[Signature]()  # captures that ran out of memory
        self.replays = Counter[str]()  # replayed launches, by `Signature.step_name`
        self._layout = lru_cache(LAYOUTS)(lambda kind, b: layout_of(b, kind.specs, backend))

    def run(
        self,
        plan: StepPlan,
        ids: Ids,
        kind: StepKind,
        how: Settings | None = None,
        wider: int = 0,
        chain: Chain | None = None,
    ) -> StepOutput:
        """Runs one step. ids [T]: the token of every row, before padding. With `how` the launch
        also samples all rows that the plan emits and, with a `chain`, draft tokens after them.
        `wider` selects the backend's n-th wider launch."""
        if chain and not chain.plan and not len(self.sampled):
            rule = "a chain without a plan keeps its guesses, for a step that is settled late"
            raise RuleError(rule, "a runner without overlap", "Give the chain a plan, or overlap")
        plan = self.pad_plan(plan)
        if not (chain and chain.plan):
            self.check(plan, kind)
        if self.studio and any(plan.bucket.moves):
            pools = [self.pools[g] for g in kind.groups]
            plan = without_moves(plan, pools, self.ops.device)
        steps: list[tuple[StepPlan, Ids, StepKind]] = [(plan, ids, kind)]
        if chain and chain.plan:
            steps.append((chain.plan, (), chain.kind))
        parts, image = self._load(steps, how, wider)

        def launch() -> StepOutput:
            """Reads the arena, the weights, the cache and, for ids that name samples, `sampled`."""
            rows, *later = [self._bind(part, image) for part in parts]
            if chain is None:
                return self._compute(rows)
            if later:
                return self._draft_from_plan(rows, later[0], chain)
            return self._draft_in_place(rows, chain)

        self.warmth = PLAIN
        if not self._records(kind, plan.bucket):
            return launch().without_pads(plan.real)
        buffers = [planner_buffers(part, image, self.backend) for part in parts]
        signature = Signature(
            buckets=tuple([part.layout.bucket for part in parts]),
            kind=kind,
            variants=tuple([part.variants for part in parts]),
            addresses=(address_of(image), *sum(buffers, ())),
            threads=() if self.studio else (*setting(), torch.is_inference_mode_enabled()),
            cuts=how.cuts if how else None,
            chain=chain and chain._replace(plan=None),
        )
        return self._replay_or_record(signature, launch).without_pads(plan.real)

    def _records(self, kind: StepKind, bucket: Bucket) -> bool:
        """Whether steps of this shape are recorded: to decode, draft or verify, but no prompts."""
        widths = self.widths if self.studio else range(1, RECORDED_ROWS + 1)
        prompts = kind.name == GENERATE and 1 < bucket.width and bucket.emits < bucket.tokens
        return self.graphs and (self.every or (captures(bucket, widths) and not prompts))

    def _load(
        self, steps: Sequence[tuple[StepPlan, Ids, StepKind]], how: Settings | None, wider: int
    ) -> tuple[list[Part], Any]:
        """Loads a launch's steps into the arena one after another, each with the settings. On a CPU
        the image is a numpy array: torch releases the interpreter's lock even to slice."""
        layouts = [self._layout(kind, plan.bucket) for plan, _, kind in steps]
        lens = [each.length + bool(how) * each.bucket.emits * SETTING for each in layouts]
        bounds = list(accumulate(lens, initial=0))
        room, parts = self.arena.host(bounds[-1]), list[Part]()
        for nth, (plan, ids, kind) in enumerate(steps):
            layout, place = layouts[nth], slice(*bounds[nth : nth + 2])
            own, tokens = room[place], np.asarray(ids, np.int32)
            variants = lower(plan, tokens, self.backend, layout, own[: layout.length])
            if wider:
                every = self._all(layout, variants)
                variants = tuple([each[: wider + 1][-1] for each in every])
            if how:
                write_settings(own[layout.length :], how)
            parts.append(Part(kind, layout, variants, place, how.cuts if how else None))
        image = self.arena.load(bounds[-1])
        return parts, image.numpy() if image.device.type == "cpu" else image

    def _bind(self, part: Part, image: Any) -> BoundRows:
        """Binds a step of the arena and carries out its plan's moves."""
        own, layout = image[part.place], part.layout
        pools = [self.pools[g] for g in part.kind.groups]
        views = views_of(layout, own[: layout.length])
        step = bind(layout, views, part.variants, self.backend, pools, part.kind.layer_map)
        step.relocate()
        ids, positions = inputs(views[0])
        if len(self.sampled):
            ids = resolve_ids(ids, self.sampled)
        how = None if part.cuts is None else read_settings(own[layout.length :], part.cuts)
        return BoundRows(
            kind=part.kind, ids=ids, positions=positions, arrays=views[0], step=step, how=how
        )

    def check(self, plan: StepPlan, kind: StepKind) -> None:
        """Raises unless the plan is legal."""
        if self.checks:
            pools = [self.pools[g] for g in kind.groups]
            check(plan, tuple([pool.num_pages if pool else 0 for pool in pools]))

    def _compute(self, rows: BoundRows) -> StepOutput:
        """Computes a step's rows, those it emits and, with settings, the samples of these."""
        kind = rows.kind
        wanted = (kind.hidden_layers,) if kind.hidden_layers else ()
        out = kind.forward(rows.ids, rows.positions, rows.step, *wanted)
        hidden, *layers = out if wanted else (out,)
        output = StepOutput(hidden, take_emitted(self.ops, hidden, rows.arrays))
        if layers and kind.name in DRAFTS:
            output = output._replace(next_hidden=take_emitted(self.ops, layers[0], rows.arrays))
        elif layers:
            states = concat(layers, -1)
            output = output._replace(states=states.numpy() if copies_with_numpy(states) else states)
        if rows.how is None:
            return output
        logits = kind.model.logits(output.emitted)
        return output._replace(logits=logits, sampled=self.ops.sample_tokens(logits, *rows.how))

    def _draft_from_plan(self, rows: BoundRows, later: BoundRows, chain: Chain) -> StepOutput:
        """Computes a step's samples, then draft tokens by further steps: each reads the token and
        the state of the step before."""
        assert later.how is not None, "settings were given"
        n, model, guesses = len(later.ids), cast(Any, later.kind.model), list[Guess]()
        first = output = self._compute(rows)
        for nth in range(chain.guesses):
            if nth:
                later.step.advance(later.how.ints[:, 1:])
                later.ids.copy_(guesses[-1][0][:n]).clamp_(min=0)
                if output.next_hidden is not None:
                    model.hidden[:n].copy_(output.next_hidden[:n])
                output = self._compute(later)
            assert output.logits is not None and output.sampled is not None, "settings were given"
            tokens, _ = output.sampled
            guesses.append((tokens, self.ops.compute_logprobs(output.logits, tokens, 0)[0]))
        return first._replace(logits=None, guesses=tuple(guesses))

    def _draft_in_place(self, rows: BoundRows, chain: Chain) -> StepOutput:
        """Samples the rows `shift` rows after those that the plan emits (only the device knows
        `shift`), then drafts: draft token i of request k, of n with pads, becomes sample GUESSES +
        i * n + k. For each, all rows are computed again: the row after the last counted one then
        has its token, and reads the state that the last one left."""
        assert rows.how is not None, "settings were given"
        arrays, n, model = rows.arrays, len(rows.arrays.emit), cast(Any, chain.kind.model)
        at, ints = arrays.emit + self.shift[:n], rows.how.ints.clone()
        ints[:, 1] += self.shift[:n]  # positions
        rows = rows._replace(arrays=replace(arrays, emit=at), how=rows.how._replace(ints=ints))
        first = output = self._compute(rows)
        width = len(rows.ids) // n
        begins = torch.arange(0, len(rows.ids), width, dtype=torch.int32, device=at.device)
        at = torch.maximum(at, begins)  # a pad's rows stay its own
        for i in range(chain.guesses):
            assert output.sampled is not None, "settings were given"
            place = self.keep(output.sampled[0], GUESSES + i * n)
            if i + 1 < chain.guesses:
                at, ints[:, 1] = at + 1, ints[:, 1] + 1
                ids = rows.ids.index_copy(0, at.long(), place)
                if output.next_hidden is not None:
                    model.hidden.index_copy_(0, at.long(), output.next_hidden)
                rows = rows._replace(kind=chain.kind, ids=ids, arrays=replace(arrays, emit=at))
                output = self._compute(rows)
        return first._replace(logits=None)

    @property
    def widths(self) -> tuple[int, ...]:
        """Rows per request of the steps that graphs are captured for."""
        return (self.buckets and self.buckets.widths) or (1,)

    @property
    def uniform(self) -> bool:
        """Whether recorded launches verify drafts: then all requests have equally many rows."""
        return len(self.widths) > 1

    def keep(self, token_ids: Tensor, at: int = 0) -> Tensor:
        """Writes a step's samples where the next step's rows read them; drafts from GUESSES on."""
        room = (len(self.sampled) if at else min(GUESSES, len(self.sampled))) - at
        if len(token_ids) > room:
            rule = f"a step that is settled late samples at most {room:,} tokens"
            raise RuleError(rule, f"{len(token_ids):,}", "Lower max_running_requests or n")
        return torch.clamp(token_ids, min=0, out=self.sampled[at : at + len(token_ids)])

    def pad_plan(self, plan: StepPlan) -> StepPlan:
        """Returns the plan in the smallest bucket that holds it, or unchanged."""
        buckets, whole = self.buckets, plan.bucket.requests == plan.real.requests
        if buckets is None or not whole:
            return plan
        if buckets.widths and plan.bucket.width not in buckets.widths:
            return plan
        return pad(plan, buckets.fit(plan))

    def capture(
        self,
        kind: StepKind,
        say: Callable[[str], None],
        width: int = 1,
        every: bool = False,
        chain: Chain | None = None,
    ) -> None:
        """Records steps of `width` rows per request that emit `every` row or the last one (before
        the rows of a chain's draft tokens). Does nothing if the buckets lack the width, or if this
        runner keeps no samples and a chain is asked for."""
        if self.buckets is None or width not in self.widths or (chain and not len(self.sampled)):
            return
        sizes, failed = self.buckets.grid("requests"), self._failed.total()
        for at, n in enumerate(reversed(sizes), 1):
            emit = range(width) if every else [width - (chain.guesses if chain else 1)]
            work = null_work(kind.specs, width, tuple(emit))
            plan = self.pad_plan(build(kind.specs, [work] * n))
            zeros = torch.zeros(plan.real.emits, max(FLOATS, INTS), dtype=torch.int64)
            how = Settings(zeros[:, :FLOATS].float(), zeros[:, :INTS], False)
            self.run(plan, (), kind, how, chain=chain)
            layout, last = self._layout(kind, plan.bucket), next(reversed(self.tapes), None)
            each: list[tuple[Hashable, ...]] = [()]
            if self.studio and last is not None and last.bucket == plan.bucket:  # it was captured
                each = self._all(layout, last.variants[0])
            for wider in range(1, max(map(len, each))):
                self.run(plan, (), kind, how, wider, chain)
            free = torch.cuda.mem_get_info()[0]
            rows = f"{n} requests" if width == 1 else f"{n} requests with {width} rows"
            about = f"{rows}, {len(self.tapes)} so far, {free:,} B of the GPU free"
            if self._failed.total() > failed:
                about += ", not enough for some: they run without a graph"
            named = "" if kind.name == GENERATE else f" of {kind.name}"
            say(f"graphs{named} {at} of {len(sizes)}: {about}")

    def _all(self, layout: ImageLayout, variants: Variants) -> list[tuple[Hashable, ...]]:
        """Returns per group the variants that can launch a step: its own first, then wider ones."""
        each = enumerate(zip(layout.specs, variants, strict=True))
        return [(v, *self.backend.wider(s, layout.buckets[g], v)) for g, (s, v) in each]

    def _replay_or_record(
        self, signature: Signature, launch: Callable[[], StepOutput]
    ) -> StepOutput:
        """Replays a known launch. Records a new one, or runs it plainly if it may not recur."""
        tape, always = self.tapes.get(signature), bool(self.studio or self.every)
        self.warmth = COLD
        if tape is not None:
            tape.replay()
            self.warmth = REPLAYED
            self.tapes[signature] = self.tapes.pop(signature)  # now the last to be dropped
            self.replays[signature.step_name] += 1
            if signature.chain is not None:
                self.replays[signature.chain.kind.name] += signature.chain.guesses - 1
            return cast(StepOutput, tape.output)
        if self._failed[signature] >= CAPTURES:
            self.warmth = PLAIN
            return launch()
        if not always and self._seen[signature] < STEADY.get(signature.step_name, 1):
            self._seen[signature] += 1
            if len(self._seen) > SEEN:
                self._seen.clear()
            return launch()
        tape = Graph(self.studio) if self.studio else Tape(self._room)
        try:
            tape.record(launch)
            self.tapes[signature] = tape
        except torch.OutOfMemoryError:  # the launch alone needs less memory than its capture
            self._failed[signature] += 1
            tape = None
        except RuleError:
            if always or tape.output is None:
                raise
            self.graphs = False  # only the recorder failed, the launch is done
        if tape is None:
            torch.cuda.empty_cache()
            return launch()
        while not always and len(self.tapes) > 1:
            if len(self.tapes) <= TAPES and self._room.used() <= TAPE_BYTES:
                break
            del self.tapes[next(iter(self.tapes))]  # the least recently used
        return cast(StepOutput, tape.output)


def null_work(specs: Sequence[GroupSpec], width: int, emit: tuple[int, ...]) -> RequestWork:
    """Returns a request on the null page alone, with `width` rows, `emit` of them emitted."""
    pages = [RequestPages(ints([0] * -(-width // spec.page_size))) for spec in specs]
    pairs = zip(specs, pages, strict=True)
    held = tuple([None if spec.layout is Layout.FRESH else own for spec, own in pairs])
    return RequestWork(0, width, held, emit, cross_len=1)


def without_moves(plan: StepPlan, pools: Sequence[Pool | None], device: torch.device) -> StepPlan:
    """Carries out a plan's moves and returns it without them: capturing a graph runs it twice."""
    groups = []
    for group, pool in zip(plan.groups, pools, strict=True):
        if isinstance(group, PagedGroup) and pool is not None and len(group.moves):
            pool.move(to_device(torch.from_numpy(group.moves.copy()), device))
            group = replace(group, moves=NO_MOVES)
        groups.append(group)
    bucket = replace(plan.bucket, moves=(0,) * len(groups))
    return replace(plan, groups=tuple(groups), bucket=bucket)


def views_of(layout: ImageLayout, image: Any) -> list[PlanArrays]:
    """Returns the arrays of a step's image, as tensors on the device."""
    return [PlanArrays(*map(torch.as_tensor, vars(own).values())) for own in layout.views(image)]


def inputs(rows: PlanArrays) -> tuple[Tensor, Tensor]:
    """Returns a model's inputs: the token and the position of every row."""
    return rows.ids, rows.positions


def take_emitted(ops: Ops, hidden: Tensor, rows: PlanArrays) -> Tensor:
    """Returns the rows that the plan emits, including the pads' rows."""
    return ops.take_rows(hidden, rows.emit)


def resolve_ids(ids: Tensor, sampled: Tensor) -> Tensor:
    """Returns the ids with those below 0 replaced by samples of the step before."""
    return torch.where(ids < 0, sampled[(~ids).clamp_(min=0)], ids)


def write_settings(room: Ints, settings: Settings) -> None:
    """Writes settings into the arena after a step's image; pad rows sample greedily."""
    at, count = 2 * FLOATS * (len(room) // SETTING), len(settings.floats)
    if len(room) > SETTING * count:
        room[:] = 0
    room[:at].view(np.float64).reshape(-1, FLOATS)[:count] = settings.floats.numpy()
    room[at:].view(np.int64).reshape(-1, INTS)[:count] = settings.ints.numpy()


def read_settings(room: Any, cuts: bool) -> Settings:
    """Returns the settings that `write_settings` wrote, as tensors on the device."""
    at, dtypes = 2 * FLOATS * (len(room) // SETTING), torch if isinstance(room, Tensor) else np
    floats = room[:at].view(dtypes.float64).reshape(-1, FLOATS)
    ints = room[at:].view(dtypes.int64).reshape(-1, INTS)
    return Settings(torch.as_tensor(floats), torch.as_tensor(ints), cuts)


def planner_buffers(part: Part, image: Any, backend: Backend) -> tuple[int, ...]:
    """Returns the addresses of the buffers that a library's planner keeps for this step."""
    names = backend.caps.planner_buffers
    if not names:
        return ()
    views = views_of(part.layout, image[part.place][: part.layout.length])
    handles = handles_of(part.layout, views, part.variants, backend)
    return tuple(getattr(handle, name).data_ptr() for handle in handles for name in names)


class Share(NamedTuple):
    """One request's part of a step."""

    request: PageTable
    ids: Sequence[int] | Tensor  # the tokens of its rows, the first at position cached_len
    cached_len: int = 0  # keys in the cache
    parents: tuple[int, ...] | None = None  # the tree so far; its last len(ids) nodes are the rows
    emit: tuple[int, ...] | None = None  # rows whose logits are wanted; None = the last one
    cross_len: int = 0  # its encoder's keys; an encode step writes one per row


class StepDriver:
    """Requests of a model on pools of `pages` pages per group (0 for a group without a cache), and
    steps that no scheduler makes: for certification, the lab and tests.

        driver = StepDriver(kinds_of(model), [pages] * groups, backend)
        request = driver.request()
        hidden = driver.step(driver.kinds[GENERATE], [Share(request, prompt)]).rows
        hidden = driver.step(driver.kinds[GENERATE], [Share(request, [token], len(prompt))]).rows

    Does no sampling and ends no request: call `PageTable.release` and `close` yourself."""

    def __init__(self, kinds: Kinds, pages: Sequence[int], backend: Backend) -> None:
        self.kinds = kinds
        ops = next(iter(kinds.values())).model.ops
        self.runner = Runner(group_specs(kinds.values()), pages, backend, ops)
        self.page_pools = [PagePool(n) if n else None for n in pages]
        self.cache = CacheGroups(self.runner.specs, self.page_pools)

    def request(self) -> PageTable:
        """Returns a request without keys."""
        return PageTable(self.cache)

    def plan(self, kind: StepKind, shares: Sequence[Share]) -> StepPlan:
        """Returns the plan of a step; reserves its pages."""
        keeps = any(spec.causal and spec.layout is not Layout.FRESH for spec in kind.specs)
        works = []
        for share in shares:
            new_len, parents = len(share.ids), share.parents
            depth = max(map(len, paths(parents, len(parents)))) if parents else new_len
            cross_len = new_len if kind.name == ENCODE else share.cross_len
            kv_len = share.cached_len + depth if keeps else 0
            share.request.reserve(kv_len, len(parents or ()), cross_len)
            work = RequestWork(
                cached_len=share.cached_len,
                new_len=new_len,
                pages=share.request.views(kind.groups),
                emit=share.emit,
                parents=parents,
                cross_len=cross_len,
                cross_new=new_len if kind.name == ENCODE else 0,
            )
            works.append(work)
        return build(kind.specs, works)

    def step(self, kind: StepKind, shares: Sequence[Share]) -> StepOutput:
        """Computes the rows of all shares, in order."""
        ids = torch.cat([torch.as_tensor(share.ids) for share in shares])
        out = self.runner.run(self.plan(kind, shares), ids, kind)
        for share in shares:
            share.request.clear_moves()
        return out
