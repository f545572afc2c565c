"""Plays stories on whole engines, in hostile surroundings, and compares every request with its
recomputation.

A story is a list of orders and, optionally, a function that disturbs the engine between steps. A
fault is noted under the property that it violates. An exception ends the story, but what was
answered before is still compared. One harness serves one cell; recipes receive it as `rig`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from lockstep.attention.base import Backend
from lockstep.config import EngineConfig
from lockstep.kv.prefix import HELD
from lockstep.lab.guard import Judgement, poison, shuffle
from lockstep.lab.options import FULL, RunOptions
from lockstep.lab.oracle import KINDS
from lockstep.lab.recipes import Recipe
from lockstep.lab.recompute import Recompute, StoryRequest
from lockstep.lab.speculative import OPTIONS as DRAFTS
from lockstep.lab.speculative import Recorder, drafts
from lockstep.lab.tiny import CONTEXT, EOS, Letters, Tiny, checkpoint, parts
from lockstep.lab.values import Values
from lockstep.llm.engine import Engine, Parts
from lockstep.llm.generation import Generation
from lockstep.llm.output import Chunk
from lockstep.llm.rows import Launched
from lockstep.plan.step import StepPlan
from lockstep.run.kind import GENERATE
from lockstep.sched.request import ScheduledStep
from lockstep.types import RuleError

StoryRequests = Sequence[StoryRequest]
Streams = dict[Generation, list[Chunk]]
Disturb = Callable[["InstrumentedEngine", list[Generation], int], None] | None
Watcher = Callable[["InstrumentedEngine", ScheduledStep], None]
SPACE = Letters.TOKENS.index(b" ")
CLOSE = 1e-6  # allowed per embedding element: float32 against the row normalized in float64
STEPS = 2000  # a story that takes more is reported as endless


class Injected(Exception):
    """An error that a story injects into a step; the story continues after it."""


class InstrumentedEngine(Engine):
    """Counts what its steps do, shows them to its `watchers`, and can poison its unused pages."""

    def __init__(self, config: EngineConfig, made: Parts, overlap: bool | None = False) -> None:
        super().__init__(config, made, overlap)
        self.seen: Counter[str] = Counter()
        self.cached: Counter[int] = Counter()  # pages of the prefix tree, by group
        self.watchers: list[Watcher] = []
        if self.speculation is not None:
            self.speculation.adaptive = False
        shuffle(self.scheduler.pools, seed=1)

    def poison(self) -> None:
        """Writes NaN into every page that no request or cache entry holds."""
        for pages, pool in zip(self.scheduler.pools, self.runner.pools, strict=True):
            if pages is not None and pool is not None:
                poison(pool, np.flatnonzero(pages.refs == 0).tolist())

    def finish(self) -> None:
        """Steps until no request is left."""
        while self.busy:
            self.poison()
            self.step()

    def _plan(self, step: ScheduledStep) -> StepPlan:
        if step.kind.name == GENERATE:
            self._note(step)
        plan = super()._plan(step)
        self.seen["pad_rows"] += self.runner.pad_plan(plan).bucket.tokens - plan.real.tokens
        return plan

    def _result(self, launched: Launched) -> Any:
        ended = (each.finish is not None for each in launched.rows.completions)
        self.seen["unseen_rows"] += sum(ended)
        self.seen["replays"] = self.runner.replays.total()
        result, accepted = super()._result(launched)
        for row, owner in launched.rows.drafts:
            drafted = launched.step.batch.new_lens[owner] - 1
            right = max(len(accepted.sample(row).nodes) - 1, 0)
            self.seen.update(accepted_drafts=right, rejected_drafts=drafted - right)
        return result, accepted

    def _note(self, step: ScheduledStep) -> None:
        batch, tree, running = step.batch, self.scheduler.tree, len(self.scheduler.running)
        limit, before = self.config.max_running_requests, self.cached
        counts = {g: int(np.count_nonzero(pool.tree_refs)) for g, pool in tree.groups.items()}
        self.cached = Counter(counts)
        self.seen["evicted_pages"] += (before - self.cached).total()
        self.seen["above_limit"] += max(running, len(batch.rows)) > limit
        self.seen["held_back"] += running == limit and bool(self.scheduler.waiting)
        self.seen["steps"] += 1
        self.seen["batched_steps"] += len(batch.rows) > 1
        self.seen["mixed_steps"] += len({n > 1 for n in batch.new_lens}) > 1
        self.seen["late_ids"] += int((step.ids < 0).sum())
        for rows, cached_len in zip(batch.rows, step.cached_lens.tolist(), strict=True):
            known_len, prompt_len = rows.known_len(cached_len), len(rows.request.spec.prompt)
            self.seen["chunks"] += known_len < prompt_len
            if rows.new_len > 1 and known_len > prompt_len:
                self.seen["recomputed_rows"] += rows.new_len
        for watch in self.watchers:
            watch(self, step)


class EngineHarness(Judgement):
    """The engines of one cell, and what is found in them."""

    def __init__(self, tiny: Tiny, backend: Backend, options: RunOptions = FULL) -> None:
        super().__init__()
        self.options, self.device = options, options.device
        self.parts = replace(parts(tiny, backend, self.device), draft=drafts(tiny, self.device))
        self.oracle = Recompute(self.parts)
        self.oracles = {self.device.dtype: self.oracle}  # by the cache's dtype
        # the oracle's numbers, which the plain model judges at the end
        self.values = Values(checkpoint(tiny, self.device), self.device)
        self.watchers: list[Watcher] = []  # attached to every engine
        self.drafted: dict[Any, Any] = {}  # drafts so far, by algorithm and width
        self.embedded: dict[Any, Any] = {}  # first embedding of each prompt
        self.ended: list[int] = []  # indices of the last story's requests, in order of their ends

    def engine(
        self, overlap: bool = False, draft: Sequence[str] = (), **options: Any
    ) -> InstrumentedEngine:
        """Returns a fresh engine. By default it has pages of 8 and room for every request."""
        sizes = {"page_size": 8, "max_total_tokens": 1024, "max_running_requests": 16}
        given = {"context_length": CONTEXT, "kv_cache_dtype": self.device.dtype, **sizes}
        for name in draft:
            given |= DRAFTS[name]
        given |= options
        if not self.parts.backend.caps.graphs:  # then no launch is recorded
            given.pop("graphs", None)
        return self.engine_of(EngineConfig.from_names(given), overlap)

    def engine_of(
        self, config: EngineConfig, overlap: bool = False, adaptive: bool = False
    ) -> InstrumentedEngine:
        """Returns a fresh engine of this configuration; with `overlap` it settles steps one step
        late. An `adaptive` draft chooses its depth by earlier acceptance, so it is not recorded."""
        config = replace(config, device=self.device.name, dtype=self.device.dtype)
        made = InstrumentedEngine(config, self.parts, overlap)
        made.runner.checks = self.options.checks
        made.watchers = self.watchers
        if made.speculation is not None and adaptive:
            made.speculation.adaptive = True
        elif made.speculation is not None:
            way = (config.speculative_algorithm, config.speculative_eagle_topk)
            known = self.drafted.setdefault(way, {})
            made.speculation.draft = Recorder(made.speculation.draft, known)
        return made

    def play(
        self, name: str, engine: InstrumentedEngine, orders: StoryRequests, disturb: Disturb = None
    ) -> list[Generation]:
        """Runs a story and compares every request with its recomputation, as property `name`."""
        before = engine.seen + engine.scheduler.counters
        streams: Streams = {}
        self.ended = []
        try:
            self._run(engine, orders, disturb, streams)
        except Exception as error:  # whatever broken code raises ends the story
            self.note_error(error)
        self._asked(engine)
        dtype = engine.config.kv_cache_dtype  # its rounding of keys changes the answer
        if dtype not in self.oracles:
            self.oracles[dtype] = Recompute(self.parts, dtype)
        oracle = self.oracles[dtype]
        self.note(name, [], "every request has the bits of its recomputation")
        self.note("pages", [])
        draft = None if engine.speculation is None else engine.speculation.draft
        if isinstance(draft, Recorder):
            self.note("draft", draft.differing)
        for i, (job, stream) in enumerate(streams.items()):
            self.note(name, self._differences(f"request {i}", job, orders[i], oracle))
            if orders[i].items:
                self._compare_items(job, orders[i])
                continue
            self.note(name, [f"request {i}: {fault}" for fault in stream_faults(job, stream)])
            self.note("poison", [f"request {i}: {d.error}" for d in job.completions if d.error])
            self.counters["tokens"] += sum(len(d.token_ids) for d in job.completions)
            if job.done and orders[i].abort is None and oracle.encoder is None:
                self._compare_text(job)
            if orders[i].embed:
                self._compare_embedding(job)
            if job.done and oracle is not self.oracle:
                (plain, *_), have = self.oracle.completions(orders[i]), job.output("").logprobs
                fault = f"{dtype}: request {i} has the bits of a cache without rounding"
                self.check("rounded", not same_bits(have, plain.logprobs), fault)
                self.counters["rounded_requests"] += 1
        self.counters["requests"] += len(streams)
        self.counters.update(engine.seen + engine.scheduler.counters - before)
        return list(streams)

    def _run(
        self, engine: InstrumentedEngine, orders: StoryRequests, disturb: Disturb, streams: Streams
    ) -> None:
        for step in range(STEPS):
            if len(streams) == len(orders) and not engine.busy:
                break
            while len(streams) < len(orders) and orders[len(streams)].at <= step:
                streams[orders[len(streams)].add_to(engine)] = []
            for job, order in zip(streams, orders, strict=False):
                if order.abort == step and not job.done:
                    engine.abort(job)
                    self.counters["aborted"] += 1
            if disturb is not None:
                disturb(engine, list(streams), step)
            engine.poison()
            try:
                engine.step()
            except Injected:
                self.counters["failed_steps"] += 1
            try:
                engine.check()
            except RuleError as error:
                self.note("pages", [str(error)])
            for i, (job, stream) in enumerate(streams.items()):
                stream.extend(job.new_chunks())
                if job.done and i not in self.ended:
                    self.ended.append(i)
        else:
            rule, got = f"a story ends within {STEPS} steps", "requests that never finish"
            raise RuleError(rule, got, "Inspect the scheduler")
        left = len(engine.scheduler.running) + len(engine.scheduler.waiting)
        self.check("pages", not left, f"{left} requests are still scheduled after the story")
        self._audit(engine)

    def _asked(self, engine: InstrumentedEngine) -> None:
        """Checks what no answer shows: limits, a disabled prefix cache, the cache's dtype."""
        above, limit = engine.seen["above_limit"], engine.config.max_running_requests
        fault = f"{above} steps with more than {limit} requests"
        self.check("limit", not above, fault, f"never more than {limit} together")
        tree_pools = engine.scheduler.tree.groups.values()
        kept = sum(np.count_nonzero(pool.tree_refs) for pool in tree_pools)
        if engine.config.disable_radix_cache:
            self.check("asked", not kept, f"the disabled prefix cache keeps {kept} pages")
        dtype, pools = engine.config.kv_cache_dtype, filter(None, engine.runner.pools)
        if dtype != self.device.dtype:
            held = {s.dtype for pool in pools for layer in pool.storages for s in layer}
            self.check("rounded", held == {KINDS[dtype]}, f"{dtype}: the cache has {held}")

    def _audit(self, engine: InstrumentedEngine) -> None:
        """Leaks a page of each group in turn: the engine's own account must report it."""
        for g, pool in enumerate(engine.scheduler.pools):
            if pool is None or not pool.free:
                continue
            lost, rule = pool.take(1), ""
            try:
                engine.check()
            except RuleError as error:
                rule = error.rule
            fault = f"group {g}: the engine's check accepted a leaked page"
            self.check("account", rule == HELD, fault)
            pool.give(lost)

    def _differences(
        self, who: str, job: Generation, order: StoryRequest, oracle: Recompute
    ) -> list[str]:
        out, found = job.output(""), list[str]()
        seeded = order if order.params.seed is not None else replace(order, params=job.params)
        want = oracle.completions(seeded, [c.token_ids for c in out.completions])
        begin, source = oracle.placed(order.prompt)
        for have, answer in zip(out.completions if want else (), want, strict=True):
            # compared in bits here, and by value with the plain model at the end
            ids, told = (*begin, *answer.token_ids), (answer.logprobs, answer.best)
            self.values.claim(ids, len(begin), *told, source, oracle.kv_dtype)
            n, ended = len(have.token_ids), order.abort is None and bool(job.done)
            name = f"{who} completion {have.index}" if len(want) > 1 else who
            short = (have.token_ids, have.finish_reason) != (tuple(answer.token_ids), answer.finish)
            if have.token_ids != tuple(answer.token_ids[:n]) or (ended and short):
                began, want_ids = list(have.token_ids[:12]), answer.token_ids[:12]
                found.append(f"{name}: tokens {began} ({have.finish_reason}), not {want_ids}")
            elif have.logprobs is not None and not same_bits(have.logprobs, answer.logprobs[:n]):
                found.append(f"{name}: log-probabilities differ in bits")
            elif have.top_logprobs is not None and have.top_logprobs != tuple(answer.best[:n]):
                found.append(f"{name}: the best tokens differ")
        return found + self._scores(who, job, order, oracle)

    def _compare_text(self, job: Generation) -> None:
        """Checks that every completion's text is the text of all its tokens."""
        for c in job.output("").completions:
            want, stopped = self.oracle.text(job.prompt_ids, c.token_ids, job.params)
            self.check("text", c.text == want, f"the text is {c.text!r}, not {want!r}")
            count = len(c.token_ids)
            self.counters.update(
                stopped=stopped,
                stopped_at_once=stopped and count == job.params.min_tokens,
                eos=c.token_ids[-1:] == (EOS,),
                context_ends=len(job.prompt_ids) + count == CONTEXT,
                spaces_after_nothing=(EOS, SPACE) in pairwise(c.token_ids),
            )

    def _compare_items(self, job: Generation, order: StoryRequest) -> None:
        """Checks items' tokens and scores; the first item repeats an answer that was generated."""
        done = job.output("").completions
        ids = [c.token_ids for c in done]
        self.check("items", ids == list(order.items), f"the items' tokens are {ids}")
        for item, c in zip(order.items, done, strict=True):
            same = same_bits(c.logprobs, self.item_scores(order.prompt, item))
            self.check("items", same, f"an item of {len(item)} differs from its recomputation")
        same = same_bits(done[0].logprobs, order.generated)
        self.check("items", same, "an item differs from the generation that it repeats")

    def _compare_embedding(self, job: Generation) -> None:
        """Checks that it is the last row's, with the same bits in every step."""
        who, have = f"the embedding of {len(job.prompt_ids)} tokens", job.embedding
        if have is None:
            self.note("embedding", [f"{who} is missing"])
            return
        self.values.claim_embedding(job.prompt_ids, "last", have)
        off = float(np.abs(have - self.oracle.embedding(job.prompt_ids)).max())
        self.check("embedding", off < CLOSE, f"{who} is off by {off:.3g}")
        same = same_bits(have, self.embedded.setdefault(job.prompt_ids, have))
        self.check("embedding", same, f"{who} differs from the same embedding in another step")
        self.counters["embedded"] += 1

    def _scores(
        self, who: str, job: Generation, order: StoryRequest, oracle: Recompute
    ) -> list[str]:
        out, k = job.output(""), order.params.top_prompt_logprobs
        if out.prompt_logprobs is None or k is None:
            return []
        scores, best = oracle.scores(order.prompt, k=k)
        self.values.claim(order.prompt, 1, scores, best, cache_dtype=oracle.kv_dtype)
        n, last = len(out.prompt_logprobs), len(order.generated)
        self.counters["scored_tokens"] += n
        whole = n == len(order.prompt)
        if not whole and job.done and order.abort is None:
            return [f"{who}: {n} prompt log-probabilities for {len(order.prompt)} tokens"]
        if not same_bits(out.prompt_logprobs[1:], scores[: n - 1]):
            return [f"{who}: prompt log-probabilities differ in bits"]
        if whole and last and not same_bits(out.prompt_logprobs[-last:], order.generated):
            return [f"{who}: a score differs from generation's log-probability"]
        same = not k or out.prompt_top_logprobs == ((), *best)[:n]
        return [] if same else [f"{who}: the prompt's best tokens differ"]

    def item_scores(self, prompt: tuple[int, ...], item: tuple[int, ...]) -> Any:
        """Returns the log-probabilities of an item after a prompt, computed whole."""
        begin, source = self.oracle.placed(prompt)
        ids = (*begin, *item)
        scores = self.oracle.scores(ids, source)[0][len(begin) - 1 :]
        self.values.claim(ids, len(begin), scores, source=source)
        return scores


def stream_faults(job: Generation, stream: Sequence[Chunk]) -> list[str]:
    """Describes where the streamed chunks differ from the final answer."""
    found = []
    for completion in job.output("").completions if job.done and stream else ():
        mine = [c for c in stream if c.index == completion.index]
        text = "".join(c.text for c in mine)
        if text != completion.text:
            found.append(f"streamed {text!r}, answered {completion.text!r}")
        if sum((c.token_ids for c in mine), ()) != completion.token_ids:
            found.append("the streamed tokens differ from the answer's")
        last, reason = [c.finish_reason for c in mine if c.finish_reason], completion.finish_reason
        if last != [reason] and reason != "abort":
            found.append(f"the stream ended with {last}, the answer with {reason}")
    return found


def same_bits(have: Any, want: Any) -> bool:
    """Compares float32 bits. A NaN or a missing value equals nothing, so shared errors differ."""
    if have is None or want is None:
        return False
    a, b = np.asarray(have, np.float32), np.asarray(want, np.float32)
    return a.tobytes() == b.tobytes() and a.shape == b.shape and not bool(np.isnan(a).any())


def judge(recipe: Recipe, tiny: Tiny, backend: Backend, options: RunOptions = FULL) -> Judgement:
    """Plays a recipe, then judges the values by the plain float64 model."""
    rig = EngineHarness(tiny, backend, options)
    recipe.play(rig, options.quick)
    found = rig.values.verdict()
    if found.judged or found.faults:
        rig.out_error, rig.tolerance_used = found.error, found.used
        error = f"max error {found.error:.3g}, {found.used:.3g} of the tolerance"
        if found.undecided:
            error += f"; {found.undecided} after a close choice of experts are not judged"
        rig.note("value", found.faults, f"{found.judged} numbers, {error}")
    rig.require(recipe.required_counters)
    return rig
