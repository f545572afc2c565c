"""The scheduler with a model made of hashes: every request ends with the tokens of its lone run,
whatever other requests do.

The model's key at a position is a hash of the tokens up to it. Its memory is written by the plan's
own moves and write slots. Before a token is sampled, every slot that a row sees is read through the
plan's address formula and compared with the keys the request should have. Freed pages are wiped
after every step, and `plan.check` judges every plan. Steps are settled immediately or after the
next one has been launched. Some rows are draft trees, whose accepted path is settled as one list.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from lockstep.config import EngineConfig
from lockstep.kv.tables import PagePool, pages_for, peak_pages
from lockstep.plan import address
from lockstep.plan import check as plan_check
from lockstep.plan.build import build
from lockstep.plan.step import PagedGroup, StepPlan
from lockstep.run.kind import EMBED, ENCODE, GENERATE, StepKind
from lockstep.sched.request import (
    HEAD_START,
    Accepted,
    AcceptedTokens,
    DraftTree,
    Request,
    RequestSpec,
    ScheduledRows,
    ScheduledStep,
)
from lockstep.sched.scheduler import Scheduler
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

ATTN = (AttnSpec(0.5),)
VOCABULARY = 4
LONG = "long"  # the tenant whose requests end by length only


class Piece(NamedTuple):
    """A request's share of one step."""

    rows: ScheduledRows
    ids: tuple[int, ...]
    cached_len: int

    @property
    def request(self) -> Request:
        return self.rows.request

    @property
    def new_len(self) -> int:
        return self.rows.new_len


def pieces(step: ScheduledStep) -> list[Piece]:
    ids = np.split(step.ids, step.batch.begins[1:-1])
    columns = zip(step.batch.rows, ids, step.cached_lens.tolist(), strict=True)
    return [Piece(rows, tuple(own.tolist()), cached_len) for rows, own, cached_len in columns]


def full(page_size: int) -> GroupSpec:
    return GroupSpec(Layout.DENSE, 4, 2, 8, 8, ATTN, page_size=page_size)


def window(w: int, page_size: int) -> GroupSpec:
    return replace(full(page_size), window=w)


def latent(page_size: int) -> GroupSpec:
    return GroupSpec(Layout.LATENT, 4, 1, 8, 8, ATTN, page_size=page_size)


def cross(page_size: int) -> GroupSpec:
    return GroupSpec(Layout.CROSS, 4, 2, 8, 8, ATTN, page_size=page_size, causal=False)


FRESH = GroupSpec(Layout.FRESH, 4, 2, 8, 8, ATTN, causal=False)


class Model:
    """The KV groups of a model, and the indices of those that each kind of step uses."""

    def __init__(self, specs, generate, encode=(), embed=()) -> None:
        self.specs = specs
        named = {GENERATE: generate, ENCODE: encode, EMBED: embed}
        self.kinds = {
            name: StepKind(name, None, groups, tuple(specs[g] for g in groups), (), None)
            for name, groups in named.items()
            if groups
        }


MODELS = (
    Model((full(1),), (0,)),
    Model((full(4),), (0,)),
    Model((latent(16),), (0,)),
    Model((full(4), window(6, 4)), (0, 1)),
    Model((full(4), window(5, 2), window(9, 1)), (0, 1, 2)),
    Model((window(7, 4), window(1, 2)), (0, 1)),
    Model((full(16), window(3, 4), FRESH), (0, 1), (), (2,)),
    Model((full(2), cross(4), FRESH), (0, 1), (2, 1), (2,)),
)


def mix(*values: int) -> int:
    return hash(values)


def base(ask: RequestSpec) -> int:
    """Returns the hash that all keys of a request start from: its tenant and its encoder ids."""
    return mix(zlib.crc32(ask.tenant.encode()), *ask.encoder_ids)


def keys(ask: RequestSpec, tokens: list[int]) -> list[int]:
    """Returns the key at every position."""
    return list(accumulate(tokens, mix, initial=base(ask)))[1:]


def sample(ask: RequestSpec, tokens: list[int], index: int) -> tuple[int, bool]:
    """Returns the next token, and whether the text ends with it."""
    h = mix(base(ask), *tokens, index)
    return h % VOCABULARY, ask.tenant != LONG and h // VOCABULARY % 13 == 0


def output(request: Request) -> list[int]:
    """Returns the tokens generated so far."""
    return request.tokens[len(request.spec.prompt) :]


def alone(ask: RequestSpec, index: int) -> list[int]:
    """Returns the tokens of a completion that is computed alone."""
    tokens = list(ask.prompt)
    for _ in range(ask.max_new_tokens):
        token, stop = sample(ask, tokens, index)
        tokens.append(token)
        if stop:
            break
    return tokens[len(ask.prompt) :]


@cache
def following(ask: RequestSpec, index: int) -> list[int]:
    """Returns a cached list that starts as the prompt. `text` appends to it the tokens that were
    asked for so far."""
    return list(ask.prompt)


def text(ask: RequestSpec, index: int, length: int) -> list[int]:
    """Returns the first `length` tokens of a request: prompt, completion, and what would follow
    it."""
    tokens = following(ask, index)
    while len(tokens) < length:
        tokens.append(sample(ask, tokens, index)[0])
    return tokens[:length]


def proposed(request: Request, chains: bool = False) -> DraftTree:
    """Returns a draft tree of two branches after the last token: the next three tokens, one of them
    sometimes wrong, and one other token. With `chains`, sometimes only the first branch."""
    ask, tokens = request.spec, list(request.tokens)
    right = []
    for _ in range(3):
        right.append(sample(ask, [*tokens, *right], request.index)[0])
    right[mix(*tokens) % 3] += mix(*tokens, 7) % 2  # sometimes one is wrong
    if chains and mix(*tokens, 11) % 2:
        return DraftTree(tuple(token % VOCABULARY for token in right), (0, 1, 2))
    return DraftTree(
        (right[0] % VOCABULARY, 3, right[1] % VOCABULARY, right[2] % VOCABULARY), (0, 0, 1, 3)
    )


def accepted_tokens(found: list[Accepted]) -> AcceptedTokens:
    """Packs one `Accepted` per sample into the arrays that the scheduler takes."""
    plain = [each == Accepted(each.token_ids[:1]) and each.token_ids for each in found]
    others = {k: each for k, each in enumerate(found) if not plain[k]}
    return AcceptedTokens(np.array([each[0] if each else 0 for each in plain], np.int64), others)


def limited(rows: int, requests: int) -> EngineConfig:
    return EngineConfig(chunked_prefill_size=rows, max_running_requests=requests)


class CheckedScheduler(Scheduler):
    def add(self, spec: RequestSpec) -> Request:
        """Adds a request as the engine does; refuses one that could never run."""
        self.refuse(spec)
        request = Request(spec, self.arrivals)
        self.resume([request])
        return request


class World:
    """A scheduler, its pools, and the key in every slot."""

    def __init__(self, model: Model, pages: tuple[int, ...], limits: EngineConfig) -> None:
        pools = [
            None if s.layout is Layout.FRESH else PagePool(n)
            for s, n in zip(model.specs, pages, strict=True)
        ]
        self.model, self.pools, self.limits = model, pools, limits
        self.scheduler = CheckedScheduler(model.kinds, pools, limits)
        self.store: list[dict[int, int]] = [{} for _ in model.specs]
        self.scored: dict[Request, list[int]] = {}
        self.ended: list[Request] = []
        self.steps: list[ScheduledStep] = []
        self.launched: list[tuple[ScheduledStep, list[Accepted]]] = []
        self.last: list[int] = []  # tokens that the last launched step has sampled

    def start(self) -> ScheduledStep | None:
        """Schedules and runs the next step. Returns it, or None if there is none."""
        step = self.scheduler.schedule()
        if step is not None:
            self.steps.append(step)
            assert 0 < sum(p.new_len for p in pieces(step)) <= self.limits.chunked_prefill_size
            assert sum(len(p.rows.emit) for p in pieces(step)) <= self.limits.chunked_prefill_size
            assert len(self.scheduler.running) <= self.limits.max_running_requests
            self.launch(step)
        return step

    def launch(self, step: ScheduledStep) -> None:
        plan = build(step.kind.specs, step.work)
        pools = [self.pools[g] for g in step.kind.groups]
        plan_check.check(plan, tuple(pool.num_pages if pool is not None else 0 for pool in pools))
        known = [self.known(piece) for piece in pieces(step)]
        self.scheduler.advance(step)
        for g, group in zip(step.kind.groups, plan.groups, strict=True):
            if isinstance(group, PagedGroup):
                self.write(g, group, step, known)
                self.read(g, group, step, plan, known)
        for piece in pieces(step):
            self.note_scores(piece)
        pairs = zip(pieces(step), known, strict=True)
        found = [entry for pair in pairs for entry in self.sampled(*pair)]
        self.last = [entry.token_ids[0] for entry in found]
        self.launched.append((step, found))

    def finish(self, step: ScheduledStep | None = None) -> list[Request]:
        """Settles the first of the launched steps. Returns the requests that it ended."""
        first, found = self.launched.pop(0)
        assert step is None or step is first
        done = self.scheduler.settle(first, accepted_tokens(found))
        self.ended += done
        self.wipe()
        self.scheduler.check()
        return done

    def known(self, piece: Piece) -> list[int]:
        """Returns the request's tokens before those that the piece samples. They are not read from
        the request, because that would take it out of the decode columns."""
        request = piece.request
        tokens = text(request.spec, request.index, piece.rows.known_len(piece.cached_len))
        whole = request.spec.embed or piece.rows.cross_new or piece.rows.parents is not None
        begin = piece.cached_len
        ids = [self.last[-1 - t] if t < 0 else t for t in piece.ids]
        assert whole or ids == tokens[begin : begin + piece.new_len]
        return tokens

    def abort(self, request: Request) -> None:
        before = [r for r in request.siblings or [request] if r.finish is None]
        self.scheduler.abort(request)
        self.ended += before

    def rows(self, piece: Piece, known: list[int]) -> list[int]:
        """Returns the keys that the piece writes."""
        ask, begin = piece.request.spec, piece.cached_len
        if piece.rows.cross_new:
            return [mix(base(ask), p) for p in range(piece.new_len)]
        if piece.rows.parents is None:
            return keys(ask, known)[begin : begin + piece.new_len]
        return [keys(ask, known[:-1] + self.path(piece, node))[-1] for node in range(piece.new_len)]

    @staticmethod
    def path(piece: Piece, node: int, ids: bool = True) -> list[int]:
        """Returns the token ids, or the node indices, on the path from the root to `node`."""
        out = []
        while node >= 0:
            out.append(piece.ids[node] if ids else node)
            node = piece.rows.parents[node]
        return out[::-1]

    def write(self, g: int, group: PagedGroup, step: ScheduledStep, known: list[list[int]]) -> None:
        store = self.store[g]
        values = [store[int(a)] for a, _ in group.moves]
        store.update((int(to), value) for (_, to), value in zip(group.moves, values, strict=True))
        rows = [row for each in zip(pieces(step), known, strict=True) for row in self.rows(*each)]
        if len(group.write_slots):
            store.update(zip(group.write_slots.tolist(), rows, strict=True))

    def read(
        self, g: int, group: PagedGroup, step: ScheduledStep, plan: StepPlan, known: list[list[int]]
    ) -> None:
        spec, store = group.spec, self.store[g]
        for i, piece in enumerate(pieces(step)):
            ask, begin, end = piece.request.spec, 0, int(group.kv_lens[i])
            if spec.layout is Layout.CROSS:
                assert end == len(ask.encoder_ids)
                true = [mix(base(ask), p) for p in range(end)]
            else:
                end = piece.cached_len + (piece.new_len if piece.rows.parents is None else 0)
                true = keys(ask, known[i])[:end]
                if spec.window is not None:
                    begin = max(0, piece.cached_len - spec.window + 1)
            seen = np.arange(begin, end, dtype=np.int32)
            slots = address.paged(
                group.page_ids, group.page_indptr, group.first_pos, spec.page_size, i, seen
            )
            assert [store.get(s) for s in slots.tolist()] == true[begin:end], f"group {g}: {piece}"
            if piece.rows.parents is not None and spec.layout is not Layout.CROSS:
                keys_of = self.rows(piece, known[i])
                for node in range(piece.new_len):
                    row = int(plan.q_indptr[i]) + node
                    tail = group.tail_slots[plan.tail_indptr[row] : plan.tail_indptr[row + 1]]
                    if piece.rows.chain:
                        tail = address.paged(
                            group.page_ids,
                            group.page_indptr,
                            group.first_pos,
                            spec.page_size,
                            i,
                            piece.cached_len + np.arange(node + 1),
                        )
                    want = [keys_of[each] for each in self.path(piece, node, ids=False)]
                    assert [store[s] for s in tail.tolist()] == want

    def note_scores(self, piece: Piece) -> None:
        ask = piece.request.spec
        rows = piece.rows.emit[: len(piece.rows.emit) - piece.rows.samples]
        if not ask.embed and piece.rows.parents is None:
            assert not rows or ask.wants_prompt_logprobs
            assert piece.rows.emit[len(rows) :] == (piece.new_len - 1,) * piece.rows.samples
            self.scored.setdefault(piece.request, []).extend(piece.cached_len + row for row in rows)

    def sampled(self, piece: Piece, known: list[int]) -> list[Accepted]:
        ask, request = piece.request.spec, piece.request
        if piece.rows.parents is not None:
            return [self.verified(piece, known)]
        samples = piece.rows.samples
        indices = range(samples) if samples > 1 else [request.index] * samples
        drawn = [sample(ask, known, index) for index in indices]
        return [Accepted((token,), 1 if stop else None) for token, stop in drawn]

    def verified(self, piece: Piece, known: list[int]) -> Accepted:
        """Returns what is accepted: starting at the root, samples the token after a node and moves
        on to the child that has it, until no child has it."""
        tokens, nodes, stop_len, node = list(known), [0], None, 0
        while True:
            token, stop = sample(piece.request.spec, tokens, piece.request.index)
            tokens.append(token)
            if stop and stop_len is None:
                stop_len = len(nodes)
            below = [i for i, parent in enumerate(piece.rows.parents) if parent == node]
            node = next((i for i in below if piece.ids[i] == token), -1)
            if node < 0:
                return Accepted(tuple(tokens[len(known) :]), stop_len, tuple(nodes))
            nodes.append(node)

    def wipe(self) -> None:
        for spec, pool, store in zip(self.model.specs, self.pools, self.store, strict=True):
            if pool is not None:
                for slot in [slot for slot in store if not pool.refs[slot // spec.page_size]]:
                    del store[slot]

    def run(self) -> None:
        """Steps until nothing is left to do."""
        while self.start() is not None or self.launched:
            self.finish()

    def settle(self) -> None:
        """Checks the idle state: every request ended, every page is free or cached, and every
        cached page can be freed."""
        s = self.scheduler
        assert s.schedule() is None
        assert not s.running and not s.waiting and not s.embeds
        s.check()
        for g, pool in enumerate(self.pools):
            if pool is not None:
                assert pool.free + np.count_nonzero(pool.tree_refs) == pool.num_pages - 1
                assert s.tree.available(g) == pool.num_pages - 1
                assert not s.config.disable_radix_cache or not pool.tree_refs.any()

    def judge(self, request: Request) -> None:
        """Checks that a request and its siblings have the tokens, ends and scores they should
        have."""
        ask = request.spec
        for r in request.siblings or [request]:
            want = [] if ask.embed else alone(ask, r.index)
            if r.finish == "abort":
                assert output(r) == want[: len(output(r))]
                continue
            assert output(r) == want, f"{output(r)} for {want}"
            assert r.finish is not None
            if ask.wants_prompt_logprobs and r.index == 0:
                assert self.scored[r] == list(range(len(ask.prompt) - 1)), (
                    "each prompt row is scored once, in order"
                )
        assert (
            {r.finish for r in request.siblings or [request]} == {"abort"}
            or any(r.finish == "abort" for r in request.siblings or [request])
            or len(request.siblings or [request]) == ask.n
        )


def least(model: Model, asks: list[RequestSpec]) -> tuple[int, ...]:
    """Returns the fewest pages per group, the null page included, with which every request can
    run."""
    out = []
    for spec in model.specs:
        encoder = spec.layout is Layout.CROSS
        needs = [
            pages_for(len(a.encoder_ids), spec) if encoder else peak_pages(spec, a.max_keys, 1)
            for a in asks
        ]
        out.append(1 + max(needs, default=1))
    return tuple(max(2, n) for n in out)


TEXTS = [[1, 2, 3, 0] * 9, [1, 2, 3, 0] * 3 + [3, 3, 1] * 8, [2] * 36]


@st.composite
def asks(draw: st.DrawFn, model: Model, chunk: int) -> RequestSpec:
    text = draw(st.sampled_from(TEXTS))
    prompt = text[: draw(st.integers(0, 24))] + draw(
        st.lists(st.integers(0, 3), min_size=1, max_size=4)
    )
    if EMBED in model.kinds and draw(st.integers(0, 4)) == 0:
        return RequestSpec(tuple(prompt[:chunk]), embed=True)
    encoder = (
        draw(st.lists(st.integers(0, 1), max_size=min(6, chunk))) if ENCODE in model.kinds else []
    )
    return RequestSpec(
        tuple(prompt),
        draw(st.integers(0, 12)) or 1,
        draw(st.integers(1, min(3, chunk))),
        draw(st.sampled_from([0, 0, 0, 1, 2])),
        draw(st.integers(0, 4)) == 0,
        tuple(encoder),
        draw(st.sampled_from(["", "", "t", LONG])),
        needs_values=draw(st.booleans()),
    )


@dataclass(frozen=True)
class Arrival:
    spec: RequestSpec
    step: int
    abort: int | None  # this many steps after its arrival
    flying: bool  # the abort arrives while a step runs


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[Model, tuple[int, ...], EngineConfig, list[Arrival]]:
    model = draw(st.sampled_from(MODELS))
    limits = limited(draw(st.sampled_from([1, 3, 8, 64])), draw(st.sampled_from([1, 2, 5, 16])))
    limits = replace(limits, disable_radix_cache=draw(st.integers(0, 4)) == 0)
    asked = draw(st.lists(asks(model, limits.chunked_prefill_size), min_size=1, max_size=9))
    aborts = st.one_of(st.none(), st.none(), st.none(), st.integers(0, 12))
    arrivals = [
        Arrival(a, draw(st.integers(0, 20)), draw(aborts), draw(st.booleans())) for a in asked
    ]
    extra = draw(st.sampled_from([0, 0, 3, 10, 60]))
    pages = tuple(n + extra for n in least(model, [a for a in asked if not a.embed]))
    return model, pages, limits, arrivals


@given(scenarios(), st.booleans(), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_request_ends_with_the_tokens_of_its_lone_run(scenario, late, drafted):
    model, pages, limits, arrivals = scenario
    world = World(model, pages, limits)
    taken: dict[int, Request] = {}
    for now in range(4000):
        for i, a in enumerate(arrivals):
            if a.step == now:
                taken[i] = world.scheduler.add(a.spec)
        due = [
            (taken[i], a)
            for i, a in enumerate(arrivals)
            if i in taken and a.abort is not None and a.step + a.abort == now
        ]
        for request, _ in [pair for pair in due if not pair[1].flying]:
            world.abort(request)
        world.wipe()
        for request in world.scheduler.running if drafted else ():
            settled = request.launched_in <= world.scheduler.settled
            if output(request) and settled and request.missing_len == 1:
                request.draft = proposed(request, chains=True)
        step = world.start()
        for request, _ in [pair for pair in due if pair[1].flying]:
            world.abort(request)
            world.wipe()
        if step is None and not world.launched and now > 40:
            break
        while len(world.launched) > (late and step is not None):
            world.finish()
    else:
        pytest.fail("no end in sight")
    for request in taken.values():
        world.judge(request)
    members = [r for request in taken.values() for r in request.siblings or [request]]
    assert sorted(map(id, members)) == sorted(map(id, world.ended)), "each request ends once"
    world.settle()
    for name, count in world.scheduler.counters.items():
        event(f"{name}: {'yes' if count else 'no'}")


def world(model: Model, pages: int, size: int = 64, running: int = 16) -> World:
    return World(model, (pages,) * len(model.specs), limited(size, running))


DENSE, HYBRID, CROSSED = MODELS[1], MODELS[3], MODELS[7]


def test_schedule_returns_none_if_there_is_nothing_to_do():
    assert world(DENSE, 8).scheduler.schedule() is None


@pytest.mark.parametrize("model", MODELS)
def test_a_cache_with_room_for_one_request_completes_all_requests(model):
    asked = [RequestSpec((1, 2, 3, i % 4, i), 20, tenant=LONG) for i in range(5)]
    w = World(model, least(model, asked), limited(8, 16))
    requests = [w.scheduler.add(ask) for ask in asked]
    w.run()
    for request in requests:
        w.judge(request)
    w.settle()


def test_preemption_in_a_small_cache_changes_no_token():
    w = world(DENSE, 13)
    requests = [w.scheduler.add(RequestSpec((1, 2, i), 36, tenant=LONG)) for i in range(3)]
    lost, before = 0, []
    while (step := w.start()) is not None:
        lost += sum(not request.running for request in before)
        w.finish(step)
        before = [request for request in requests if request.running]
    assert w.scheduler.counters["preempted"] == lost > 0
    for request in requests:
        w.judge(request)
    w.settle()


def test_a_request_that_never_fits_is_refused_with_both_numbers():
    w = world(HYBRID, 6, size=8)
    w.scheduler.add(RequestSpec((1,) * 20, 1))
    with pytest.raises(RuleError, match=r"has 5 pages of 4; got 21 keys, which need 6"):
        w.scheduler.add(RequestSpec((1,) * 20, 2))
    with pytest.raises(RuleError, match=r"at most 8 rows; got 9 completions"):
        w.scheduler.add(RequestSpec((1,), 1, n=9))
    with pytest.raises(RuleError, match="supports the request; got embeddings"):
        w.scheduler.add(RequestSpec((1,), embed=True))
    with pytest.raises(RuleError, match="supports the request; got an encoder"):
        w.scheduler.add(RequestSpec((1,), encoder_ids=(1,)))
    w.run()
    w.settle()


def test_an_embedding_or_encoder_input_longer_than_a_step_is_refused():
    w = world(CROSSED, 20, size=8)
    for ask in (RequestSpec((1,) * 9, embed=True), RequestSpec((1,), encoder_ids=(1,) * 9)):
        with pytest.raises(RuleError, match=r"at most 8 tokens; got 9"):
            w.scheduler.add(ask)


@pytest.mark.parametrize(
    "wrong", [{"n": 2, "max_new_tokens": 0}, {"embed": True, "encoder_ids": (1,)}]
)
def test_a_request_spec_that_contradicts_itself_is_refused(wrong):
    with pytest.raises(RuleError):
        RequestSpec(**{"prompt": (1,), **wrong})


def test_decode_rows_are_scheduled_first_and_prompts_fill_the_rest_of_a_step():
    w = world(DENSE, 200, size=10)
    early = [w.scheduler.add(RequestSpec((1, i), 30, tenant=LONG)) for i in range(3)]
    w.finish(w.start())
    late = w.scheduler.add(RequestSpec((2,) * 20, 4))
    step = w.start()
    assert [(p.request, p.new_len) for p in pieces(step)] == [*((r, 1) for r in early), (late, 7)]
    w.finish(step)
    w.run()
    for request in (*early, late):
        w.judge(request)


def test_a_prompt_continues_beside_one_whose_completions_do_not_fit_the_step():
    w = world(DENSE, 60, size=4)
    decodes = w.scheduler.add(RequestSpec((1,), 3, tenant=LONG))
    w.finish(w.start())
    four, long = (
        w.scheduler.add(RequestSpec((1, 2, 3), 2, n=4)),
        w.scheduler.add(RequestSpec((2,) * 6, 2)),
    )
    for rows in ([(decodes, 1), (four, 2), (long, 1)], [(decodes, 1), (long, 3)], [(four, 1)]):
        step = w.start()
        assert [(p.request, p.new_len) for p in pieces(step)][: len(rows)] == rows
        w.finish(step)
    w.run()
    for request in (decodes, four, long):
        w.judge(request)


def test_prompts_of_one_row_begin_in_one_step():
    w = world(DENSE, 60)
    requests = [w.scheduler.add(RequestSpec((i,), 4)) for i in (1, 2, 3)]
    step = w.start()
    assert [(p.request, p.new_len) for p in pieces(step)] == [(r, 1) for r in requests]
    w.finish(step)
    w.run()
    for request in requests:
        w.judge(request)


def test_embeddings_and_encoders_have_their_own_steps_at_most_every_other_one():
    w = world(CROSSED, 60, size=12)
    asked = [
        RequestSpec((1, 2), 8),
        *(RequestSpec((1,) * 10, embed=True) for _ in range(4)),
        *(RequestSpec((1, 2, 3), 8, encoder_ids=(i, 7)) for i in range(8)),
    ]
    requests = [w.scheduler.add(ask) for ask in asked]
    w.run()
    for step in w.steps:
        assert step.kind.groups in ((0, 1), (2, 1), (2,))
        assert len({(p.request.spec.embed, p.rows.cross_new > 0) for p in pieces(step)}) == 1
    whole = [step.kind.name != GENERATE for step in w.steps]
    assert not any(a and b for a, b in pairwise(whole[:6])), (
        "generation is not held up by embeddings"
    )
    for request in requests:
        w.judge(request)
    w.settle()


def test_a_second_turn_hits_the_tokens_that_the_first_one_generated():
    w = world(DENSE, 60)
    first = w.scheduler.add(RequestSpec((1, 2, 3, 0, 1), 14, tenant=LONG))
    w.run()
    assert len(output(first)) == 14
    second = w.scheduler.add(RequestSpec((*first.tokens, 2, 2), 4, tenant=LONG))
    w.run()
    assert second.hit_len == (len(first.tokens) - 1) // 4 * 4
    w.judge(second)


def test_a_request_for_prompt_logprobs_matches_no_prefix_but_inserts_its_own():
    w = world(DENSE, 60)
    prompt = (1, 2, 3, 0) * 4
    w.scheduler.add(RequestSpec(prompt, 2))
    w.run()
    scored, plain = (
        w.scheduler.add(RequestSpec(prompt, 2, wants_prompt_logprobs=True)),
        w.scheduler.add(RequestSpec(prompt, 2)),
    )
    w.run()
    assert (scored.hit_len, plain.hit_len) == (0, 12)
    other = w.scheduler.add(RequestSpec((3, *prompt), 2, wants_prompt_logprobs=True))
    w.run()
    again = w.scheduler.add(RequestSpec((3, *prompt), 2))
    w.run()
    assert again.hit_len == 16
    for request in (scored, plain, other, again):
        w.judge(request)


def test_scoring_alone_samples_nothing():
    w = world(DENSE, 60, size=5)
    request = w.scheduler.add(RequestSpec((1, 2, 3, 0) * 3, 0, wants_prompt_logprobs=True))
    w.run()
    assert request.finish == "length" and output(request) == []
    assert w.scored[request] == list(range(11))


def test_completions_share_the_pages_of_the_prompt_and_end_independently():
    w = world(HYBRID, 200, size=16)
    request = w.scheduler.add(RequestSpec((1, 2, 3, 0) * 3 + (1,), 9, n=4))
    step = w.start()
    assert pieces(step)[0].rows.emit == (12,) * 4
    w.finish(step)
    tables = [r.table for r in request.siblings or [request]]
    assert len({tuple(t.held(0)[:3]) for t in tables}) == 1, "whole pages of the prompt are shared"
    assert len({t.held(0)[3] for t in tables}) == 4, "the partial one is everyone's own"
    w.run()
    w.judge(request)
    w.settle()


def test_completions_that_do_not_fit_wait():
    w = World(DENSE, (9,), limited(16, 2))
    request = w.scheduler.add(RequestSpec((1, 2, 3, 0) * 3 + (1,), 9, n=5))
    w.run()
    w.judge(request)
    w.settle()


def test_equal_prompts_in_one_step_end_up_in_the_same_pages():
    w = world(DENSE, 60)
    twins = [w.scheduler.add(RequestSpec((1, 2, 3, 0) * 4, 3)) for _ in range(2)]
    w.finish(w.start())
    assert twins[0].table.held(0)[:4] == twins[1].table.held(0)[:4]
    w.run()
    for twin in twins:
        w.judge(twin)


@pytest.mark.parametrize("late", [False, True])
def test_an_abort_between_launch_and_settling_leaves_no_page_and_no_fork(late):
    w = world(HYBRID, 30)
    request, other = (
        w.scheduler.add(RequestSpec((1, 2, 3, 0) * 3, 9, n=2)),
        w.scheduler.add(RequestSpec((2, 2), 5)),
    )
    step = w.start()
    w.abort(request)
    assert request.finish == "abort" and not request.running
    w.wipe()
    if late:
        w.start()
    assert request not in w.finish(step)
    assert not request.siblings, "nothing is forked from a request that was aborted"
    w.run()
    w.judge(other)
    w.settle()


def test_a_request_can_be_aborted_while_it_runs_or_waits():
    w = world(CROSSED, 40, size=8, running=1)
    asked = [
        RequestSpec((1, 2, 3), 9),
        RequestSpec((1, 2), 3),
        RequestSpec((3,), 4, encoder_ids=(1, 2)),
        RequestSpec((1, 2), embed=True),
    ]
    running, *waiting = (w.scheduler.add(ask) for ask in asked)
    w.finish(w.start())
    w.finish(w.start())
    for request in (running, *waiting):
        w.scheduler.abort(request)
        assert request.finish is not None
    w.settle()


def test_steps_are_launched_and_settled_once_and_in_order():
    w = world(DENSE, 40)
    w.scheduler.add(RequestSpec((1, 2), 5, tenant=LONG))
    step = w.scheduler.schedule()
    with pytest.raises(RuleError, match="0 launched and 1 not yet"):
        w.scheduler.schedule()
    w.launch(step)
    with pytest.raises(RuleError, match="launched, once"):
        w.scheduler.advance(step)
    with pytest.raises(RuleError, match="1 samples; got 0"):
        w.scheduler.settle(step, accepted_tokens([]))
    second = w.start()
    with pytest.raises(RuleError, match="2 launched and 0 not yet"):
        w.scheduler.schedule()
    with pytest.raises(RuleError, match="settled in order"):
        w.scheduler.settle(second, accepted_tokens([Accepted((1,))]))
    w.finish(step)
    with pytest.raises(RuleError, match="in order, each once"):
        w.scheduler.settle(step, accepted_tokens([Accepted((1,))]))
    w.finish(second)
    w.run()
    w.settle()


def test_a_row_refers_to_the_sample_of_the_previous_step_until_that_is_settled():
    w = world(DENSE, 40)
    requests = [w.scheduler.add(RequestSpec((1, i), 5, tenant=LONG)) for i in range(3)]
    first = w.start()
    second = w.start()
    assert [piece.ids for piece in pieces(second)] == [(-1,), (-2,), (-3,)]
    w.finish(first)
    assert [r.tokens[2] for r in requests] == [sample(r.spec, r.tokens[:2], 0)[0] for r in requests]
    assert all(r.tokens[3] < 0 and r.launched_in == second.number for r in requests)
    w.finish(second)
    w.run()
    for request in requests:
        w.judge(request)


def test_a_stop_found_late_costs_one_discarded_row_and_no_page():
    for start in range(40):
        ask = RequestSpec((1, 2, 3, start % 4, start), 30)
        if len(want := alone(ask, 0)) in (3, 7, 11):  # its last key would fill a page
            w = world(DENSE, 40)
            request = w.scheduler.add(ask)
            while w.start() is not None or w.launched:
                while len(w.launched) > (request.finish is None):
                    w.finish()
            assert output(request) == want and request.finish == "stop"
            rows = sum(piece.new_len for step in w.steps for piece in pieces(step))
            assert rows == len(ask.prompt) + len(want), "one more than is needed"
            cached = np.count_nonzero(w.pools[0].tree_refs)
            assert cached == (len(ask.prompt) + len(want) - 1) // 4, "the last key is not cached"
            w.settle()
            return
    pytest.fail("no text of such a length")


def test_a_request_skips_a_step_only_if_it_needs_token_values_or_has_all_its_tokens():
    w = world(DENSE, 60)
    waits, ends, goes = (
        w.scheduler.add(RequestSpec((1, 2), 9, tenant=LONG, needs_values=True)),
        w.scheduler.add(RequestSpec((1, 3), 1, tenant=LONG)),
        w.scheduler.add(RequestSpec((1, 1), 9, tenant=LONG)),
    )
    w.start()
    second = w.start()
    assert [piece.request for piece in pieces(second)] == [goes]
    w.finish()
    third = w.start()
    assert [piece.request for piece in pieces(third)] == [waits, goes] and ends.finish == "length"
    w.finish()
    w.finish()
    w.run()
    for request in (waits, ends, goes):
        w.judge(request)
    w.settle()


def test_accepted_tokens_are_cut_at_a_stop_and_at_the_length():
    kept = Accepted((5, 6, 7, 8), 2, (0, 1, 2, 4)).cut(9)
    assert kept == ((5, 6), "stop")
    assert Accepted((5, 6, 7, 8), 3).cut(2) == ((5, 6), "length")
    assert Accepted((5, 6), 2).cut(2) == ((5, 6), "stop")
    assert Accepted((5, 6)).cut(3) == ((5, 6), None)
    assert Accepted((), 0).cut(3) == ((), "stop"), "what could not be sampled"


@pytest.mark.parametrize("most", [2, 3, 4, 5, 9, 20])
def test_an_accepted_path_is_settled_as_one_list_and_its_keys_move(most):
    w = world(HYBRID, 40, size=32)
    ask = RequestSpec((1, 2, 3, 0, 1), most, tenant=LONG)
    request, other = w.scheduler.add(ask), w.scheduler.add(replace(ask, prompt=(3, 1)))
    longest = moves = 0
    while request.finish is None:
        if output(request) and request.launched_in <= w.scheduler.settled:
            request.draft = proposed(request)
        before = len(output(request))
        step = w.start()
        moves += sum(len(pages.moves) for entry in step.pages for pages in entry)
        w.finish(step)
        longest = max(longest, len(output(request)) - before)
    assert longest >= min(2, most - 1) and (moves > 0 or most < 5)
    w.run()
    w.judge(request)
    w.judge(other)
    w.settle()


def test_a_higher_priority_displaces_a_lower_one_that_arrived_earlier():
    w = world(DENSE, 30, running=2)
    low = [w.scheduler.add(RequestSpec((1, i), 60, tenant=LONG)) for i in range(2)]
    w.finish(w.start())
    high = w.scheduler.add(RequestSpec((2, 3), 6, priority=1))
    for _ in range(8):
        w.finish(w.start())
    assert high.finish is not None and low[1].finish is None
    w.run()
    for request in (*low, high):
        w.judge(request)
    w.settle()


def test_a_request_that_is_already_in_the_step_is_not_preempted_for_another():
    w = world(DENSE, 22, size=8)
    low = [w.scheduler.add(RequestSpec((1, i), 40, tenant=LONG)) for i in range(3)]
    w.finish(w.start())
    high = w.scheduler.add(RequestSpec((2,) * 60, 4, priority=1))
    held_up = 0
    while (step := w.start()) is not None:
        assert all(piece.request.running for piece in pieces(step))
        held_up += high.running and all(piece.request is not high for piece in pieces(step))
        w.finish(step)
    assert held_up, "the prompt ran out of pages behind requests that had their rows already"
    for request in (*low, high):
        w.judge(request)
    w.settle()


def test_no_request_is_overtaken_forever():
    w = world(DENSE, 14, running=2)
    w.scheduler.add(RequestSpec((1, 2), 30, priority=1, tenant=LONG))
    low = w.scheduler.add(RequestSpec((0,) * 30, 8))
    overtaken = 0
    while low.finish is None:
        w.scheduler.add(RequestSpec((1, 3, overtaken % 4), 3, priority=1))
        overtaken += 1
        w.finish(w.start())
        assert overtaken < 3 * HEAD_START
    w.run()
    w.judge(low)
    w.settle()


def test_within_a_priority_the_first_request_runs_first_even_if_it_is_large():
    w = world(DENSE, 16)
    w.scheduler.add(RequestSpec((1, 2), 40, tenant=LONG))
    w.finish(w.start())
    large = w.scheduler.add(RequestSpec((2,) * 50, 4))
    small = [w.scheduler.add(RequestSpec((3, i), 4)) for i in range(4)]
    while large.finish is None:
        w.finish(w.start())
        assert large.running or large.finish or not any(r.running or r.finish for r in small)
    w.run()
    w.settle()


def test_the_order_of_requests_is_total_and_a_head_start_is_bounded():
    low, high = (
        Request(RequestSpec((1,)), 0),
        [Request(RequestSpec((1,), priority=1), a) for a in range(1, 200)],
    )
    overtaking = [r for r in high if r < low]
    assert len(overtaking) == HEAD_START - 1
    siblings = [Request(RequestSpec((1,), n=2), 5, index) for index in range(2)]
    assert siblings[0] < siblings[1]
