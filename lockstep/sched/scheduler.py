"""The scheduler: continuous batching over pages that may run out.

Rows of decoding requests go first, prompts fill the rest of the budget in chunks, and encoders and
embeddings have steps of their own. When pages are short, cached ones are evicted, then the
worst-ranked request is preempted: it is computed again later, to the same bits. Knows lengths,
pages and order; it never sees a tensor or the meaning of a token.
"""

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

import numpy as np

from lockstep.config import EngineConfig
from lockstep.kv.prefix import Prefix, Root
from lockstep.kv.tables import CacheGroups, PageTable, Pools, pages_for, peak_pages
from lockstep.run.kind import DRAFT, EMBED, ENCODE, GENERATE, Kinds, group_specs
from lockstep.sched.request import (
    Accepted,
    AcceptedTokens,
    Batch,
    Decoding,
    DraftTree,
    Request,
    RequestSpec,
    ScheduledRows,
    ScheduledStep,
    StepBuilder,
    is_held,
)
from lockstep.types import Layout, OutOfPages, RuleError

BATCHES = 16  # cached besides the one of all members: drafts of several lengths


class Scheduler:
    """`resume` and `abort` requests at any time. `schedule` a step, `advance` when it is launched,
    `settle` it; repeat until `schedule` returns None and no launched step is left to settle."""

    def __init__(self, kinds: Kinds, pools: Pools, config: EngineConfig, arrivals: int = 0) -> None:
        self.kinds, self.pools, self.config = kinds, tuple(pools), config
        self.specs = group_specs(kinds.values())
        drafts = kinds[DRAFT].groups if DRAFT in kinds else ()
        self._cache = CacheGroups(self.specs, self.pools, drafts)
        plain = [None if g in drafts else pool for g, pool in enumerate(pools)]
        # the groups of a request without and with a draft model
        self._caches = CacheGroups(self.specs, plain, drafts), self._cache
        self.tree = Prefix(self._cache)
        self.running: list[Request] = []  # by rank, as are the next two
        self.waiting: list[Request] = []
        self.embeds: list[Request] = []
        self.counters: Counter[str] = Counter()
        self.arrivals = arrivals  # requests so far, and the number of the next
        self.settled = 0  # the last settled step: steps are numbered from 1
        self.ends = 0  # requests that have ended
        self._members = Decoding()  # the running requests that decode
        self._batches = lru_cache(BATCHES)(Batch)  # of other rows, until a request leaves
        self._scheduled: ScheduledStep | None = None
        self._launched: list[ScheduledStep] = []  # not settled yet, in order
        self._after_whole = False
        self._blocked = False  # the head of the queue found no room in the last step
        self._groups = kinds[GENERATE].groups if GENERATE in kinds else ()

    def resume(self, requests: Iterable[Request]) -> None:
        """Queues requests without pages here: new ones, or those of another scheduler."""
        for request in requests:
            self.arrivals = max(self.arrivals, request.arrival + 1)
            insort(self.embeds if request.spec.embed else self.waiting, request)

    def abort(self, request: Request) -> None:
        """Ends a request and its siblings. They get nothing of steps that are still launched."""
        for member in request.siblings or [request]:
            if member.finish is None:
                self._end(member, "abort")

    def schedule(self) -> ScheduledStep | None:
        """Returns the next step, its pages reserved; None if nothing can run before a settling."""
        if self._scheduled is not None or len(self._launched) > 1:
            rule = "a step is scheduled when the last is launched and those before it are settled"
            got = f"{len(self._launched)} launched and {int(self._scheduled is not None)} not yet"
            raise RuleError(rule, got, "Advance what was scheduled, settle what was launched first")
        self._preempt_for_priority()
        tries = [self._whole_prompt_step, self._generate]  # alternating
        if self._after_whole:
            tries.reverse()
        step = tries[0]() or tries[1]()
        idle = not (self.running or self.waiting or self.embeds)
        assert step or self._launched or idle, f"{len(self.running)} running and no step"
        self._scheduled = step
        return step

    def advance(self, step: ScheduledStep) -> None:
        """Moves lengths: the step is launched, and any step scheduled later runs after it."""
        if step is not self._scheduled:
            rule = "the step that was scheduled last is launched, once"
            raise RuleError(rule, "another one", "Advance what schedule returned")
        self._scheduled = None
        self._launched.append(step)
        if step.kind.name == ENCODE:
            for request in step.batch.requests:
                request.encoded = True
        batch, members = step.batch, step.members
        single = [*range(members, len(batch.rows))] if step.kind.name == GENERATE else []
        if members:
            single = self._members.advance(step.number, batch.needs_values[:members]) + single
        for i in single:
            rows, table = batch.rows[i], batch.rows[i].table
            if table is not None:
                if table.pending:
                    table.clear_moves(self._groups)
                if rows.parents is None or rows.chain:
                    table.drop_scratch()
            rows.request.launch(rows, batch.first_samples[i], step.number)
            if rows.request.left <= 0:  # it only waits for its end
                self._members.remove(rows.request)

    def settle(self, step: ScheduledStep, accepted: AcceptedTokens) -> list[Request]:
        """Takes in a step's results; `accepted` has an entry per sample of its requests, in order.
        Returns the requests that end with it. Requests that ended before get nothing."""
        if step is not next(iter(self._launched), None):
            rule = "launched steps are settled in order, each once"
            raise RuleError(rule, "another one", "Settle them in order")
        batch, got = step.batch, len(accepted.token_ids)
        if got != batch.samples:
            rule = f"this step has {batch.samples} samples"
            raise RuleError(rule, str(got), "Sample the last rows of each piece's emit")
        del self._launched[0]
        self.settled = step.number
        members, count, ended = self._members, step.members, list[Request]()
        for k in accepted.others:
            if k < count:
                members.leave(batch.requests[k])
        single = members.settle(batch, step.cached_lens[:count] + 1, accepted.token_ids[:count])
        for i in [*single, *range(count, len(batch.rows))]:
            if batch.requests[i].finish is None:
                rows, begin = batch.rows[i], batch.first_samples[i]
                samples = [accepted.sample(k) for k in range(begin, begin + rows.sampled)]
                ended += self._settle(rows, step.cached_lens.item(i), samples)
        return ended

    def check(self) -> None:
        """Raises unless free + cached + held pages are all pages, in every group."""
        self.tree.check(r.table for r in self.running if r.table is not None)

    # -- admission

    def refuse(self, spec: RequestSpec) -> None:
        """Raises, with both numbers, for a request that could never run."""
        wanted = {EMBED: "embeddings"} if spec.embed else {GENERATE: "generation"}
        if spec.encoder_ids:
            wanted[ENCODE] = "an encoder"
        for name, what in wanted.items():
            if name not in self.kinds:
                raise RuleError("the model supports the request", what, "Use another model")
        size = self.config.chunked_prefill_size
        whole = len(spec.prompt) if spec.embed else len(spec.encoder_ids)
        if whole > size:
            rule = f"an embedding or an encoder is computed in one step, at most {size} tokens"
            raise RuleError(rule, f"{whole}", "Shorten it, or raise chunked_prefill_size")
        if spec.continuations > size:
            rule = f"a step emits at most {size} rows"
            got = f"{spec.continuations} completions or items"
            raise RuleError(rule, got, "Ask for fewer, or raise chunked_prefill_size")
        for g, pool in () if spec.embed else self._caches[spec.draft].cached:
            need = self._peak(spec, g, spec.max_keys, 1)
            if need > pool.num_pages - 1:
                there = f"group {g} has {pool.num_pages - 1} pages of {self.specs[g].page_size}"
                rule = f"a request fits into the cache alone: {there}"
                got = f"{spec.max_keys} keys, which need {need}"
                remedy = "Shorten the prompt, lower max_tokens, or give the cache more memory"
                raise RuleError(rule, got, remedy)

    def _peak(self, spec: RequestSpec, g: int, keys: int, step_len: int) -> int:
        """Returns a request's most pages of group g with `keys` keys, by steps of `step_len`."""
        group = self.specs[g]
        if group.layout is Layout.CROSS:
            return pages_for(len(spec.encoder_ids), group)
        return peak_pages(group, keys, step_len)

    def _admit(self, request: Request) -> bool:
        """Gives the head of the queue a table and its cached prefix, if all its tokens fit."""
        if request.launched_in > self.settled:
            return False  # it was preempted before its last token had a value
        self._blocked = True
        if len(self.running) >= self.config.max_running_requests:
            return False
        spec = request.spec
        table, node = PageTable(self._caches[spec.draft]), None
        if not self.config.disable_radix_cache:
            root = Root(spec.tenant, spec.encoder_ids, spec.draft)
            scored = request.scored_len < request.score_end  # rows to score must be computed
            limit = request.scored_len if scored else None
            node = self.tree.match(root, request.tokens, table, limit)
        request.table, request.node = table, node
        if self.running and not self._fits(request, table):
            self._release_request(request)
            return False
        self._blocked = False
        request.cached_len = request.settled_len = node.end if node is not None else 0
        table.draft_len = request.cached_len
        if request.hit_len is None:
            request.hit_len = request.cached_len
        self.counters["hit_tokens"] += request.cached_len
        self.waiting.remove(request)
        insort(self.running, request)
        return True

    def _fits(self, request: Request, table: PageTable) -> bool:
        """Whether there is room for all its known tokens, and a page per running request."""
        keys, step_len = len(request.tokens), self.config.chunked_prefill_size
        for g, _ in table.groups.cached:
            need = self._peak(request.spec, g, keys, step_len)
            if g in table.groups.stored:
                need += len(self.running) - len(table.held(g))
            if need > self.tree.available(g):
                return False
        return True

    def _preempt_for_priority(self) -> None:
        """Preempts one request of lower priority and rank if the head of the queue had no room."""
        if self._blocked and self.waiting:
            head, most = self.waiting[0], self.waiting[0].spec.priority
            lower = [each for each in self.running if head < each and each.spec.priority < most]
            if lower:
                self._preempt(lower[-1])
        self._blocked = False

    # -- steps

    def _generate(self) -> ScheduledStep | None:
        """Schedules running requests, then waiting ones; no request passes one that lacks room."""
        if GENERATE not in self.kinds:
            return None
        builder = StepBuilder(self.kinds[GENERATE], self.config.chunked_prefill_size)
        held_up = not self._place_members(builder)
        running = self.running if len(self.running) > len(self._members) else []
        ready = [
            r for r in running if r.members is None and not is_held(r.held_until, self.settled)
        ]
        for request in sorted(ready, key=lambda each: each.missing_len > 1):  # prompts last
            if request.table is not None and not self._place(request, builder):
                held_up = True
                if request.missing_len > 1:
                    break
        while self.waiting and not held_up and builder.tokens and self.waiting[0].encoded:
            head = self.waiting[0]
            held_up = not self._admit(head) or not self._place(head, builder)
        return self._step(builder)

    def _place_members(self, builder: StepBuilder) -> bool:
        """Places the next row of members that are not held. Returns whether none lacked room."""
        members, begin, fine = self._members, 0, True
        members.update()
        room = builder.room
        for request in members.due(self.settled):
            if request.table is None:
                continue  # preempted for an earlier member
            if request.number - begin >= room:
                break
            held = is_held(request.held_until, self.settled)
            if not held and request.draft is None and self._secure(request, 1, ()):
                self._store(request)  # blocks settled while it was inside
                members.look(request, request.table.views(self._groups), self._until_len(request))
                continue
            builder.add_members(members, begin, request.number)
            begin = request.number + 1
            if not held:
                fine &= request.draft is not None and self._place(request, builder)
            room = builder.room
        end = min(len(members), begin + room)
        builder.add_members(members, begin, end)
        builder.members = end if begin == 0 and end == len(members) else 0
        return fine and end == len(members)

    def _place(self, request: Request, builder: StepBuilder) -> bool:
        """Places as many of a request's rows as step and pages allow; returns whether any."""
        if request.draft is not None and self._place_tree(request, request.draft, builder):
            return True
        want = request.fitting_len(builder.tokens, builder.emits)
        new_len, begin = self._secure(request, want, builder.rows), request.cached_len
        if new_len:
            builder.add(request.rows(new_len), request.tokens[begin : begin + new_len], begin)
        return new_len > 0

    def _secure(self, request: Request, want: int, placed: Sequence[ScheduledRows]) -> int:
        """Returns for how many rows it has pages; if none, preempts worse-ranked requests."""
        while want and request.cached_len + want > request.room:
            new_len = self._reserve(request, want)
            if new_len:
                return new_len
            others = {rows.request for rows in placed}
            worse = [each for each in self.running if each not in others and request < each]
            if not worse:
                return 0
            self._preempt(worse[-1])
        return want

    def _place_tree(self, request: Request, tree: DraftTree, builder: StepBuilder) -> bool:
        """Places a request's draft if all of it has room; the draft is dropped either way."""
        request.draft = None
        nodes = 1 + len(tree.token_ids)
        if request.missing_len != 1 or nodes > builder.room:
            return False
        rows = request.tree_rows(tree)
        room = (nodes, 0) if rows.chain else (1 + tree.depth, nodes)
        if not self.make_room(request, *room):
            return False
        request.pads = tree.pads
        builder.add(rows, (request.tokens[-1], *tree.token_ids), request.cached_len)
        return True

    def make_room(self, request: Request, keys: int, nodes: int) -> bool:
        """Tries to reserve for `keys` and `nodes` more and a row after; preempts no request."""
        table, kv_len = request.table, request.cached_len + keys + 1
        if table is None:
            return False
        if nodes or kv_len > request.room:
            table.release(request.settled_len)
            if not self.tree.make_room(table.needs(kv_len, nodes)):
                return False
            table.reserve(kv_len, nodes)
            request.room = min(map(table.room, table.groups.stored))
        return True

    def _reserve(self, request: Request, want: int) -> int:
        """Releases pages outside the window, then reserves up to `want` rows; returns how many."""
        table, begin = request.table, request.cached_len
        assert table is not None, "only a request with a page table reserves pages"
        self._store(request)
        table.release(request.settled_len)
        try:
            table.reserve(begin + want)
        except OutOfPages:  # one eviction for all that outgrow their pages, a page each per group
            members, stored = self._members, self._cache.stored
            grown = len(members.due(self.settled)) + len(self.running) - len(members)
            self.tree.make_room([grown * (g in stored) for g in range(len(self.specs))])
            rooms = [table.room(g, self.tree.available(g)) for g in table.groups.stored]
            want = min(want, min(rooms) - begin)
            if want < 1 or not self.tree.make_room(table.needs(begin + want)):
                return 0
            table.reserve(begin + want)
        request.room = min(map(table.room, table.groups.stored))
        return want

    def _whole_prompt_step(self) -> ScheduledStep | None:
        """Returns a step of embeddings or encoders: of the best-ranked head that has room."""
        encoders = [request for request in self.waiting[:1] if not request.encoded]
        for head in sorted([*self.embeds[:1], *encoders]):
            step = self._embed() if head.spec.embed else self._encode()
            if step is not None:
                return step
        return None

    def _embed(self) -> ScheduledStep | None:
        builder = StepBuilder(self.kinds[EMBED], self.config.chunked_prefill_size)
        while self.embeds and len(builder.rows) < self.config.max_running_requests:
            request, ids = self.embeds[0], self.embeds[0].spec.prompt
            if len(ids) > builder.tokens:
                break
            self.embeds.pop(0)
            builder.add(ScheduledRows(request, len(ids), (len(ids) - 1,), 0), ids)
        return self._step(builder)

    def _encode(self) -> ScheduledStep | None:
        """Returns a step of the encoders at the queue's head; their requests run from now on."""
        builder = StepBuilder(self.kinds[ENCODE], self.config.chunked_prefill_size)
        while self.waiting and not self.waiting[0].encoded:
            request, ids = self.waiting[0], self.waiting[0].spec.encoder_ids
            if len(ids) > builder.tokens or not self._admit(request):
                break
            table = request.table
            assert table is not None, "an admitted request has a table"
            table.reserve(0, cross_len=len(ids))
            builder.add(ScheduledRows(request, len(ids), (), 0, table, cross_new=len(ids)), ids)
        return self._step(builder)

    def _step(self, builder: StepBuilder) -> ScheduledStep | None:
        if not builder.rows:
            return None
        self._after_whole = builder.kind.name != GENERATE
        return ScheduledStep(
            kind=builder.kind,
            number=self.settled + len(self._launched) + 1,
            ends=self.ends,
            batch=self._batch(builder),
            cached_lens=np.concatenate(builder.cached_lens),
            ids=np.concatenate(builder.ids).astype(np.int32),
            pages=tuple(builder.pages),
            members=builder.members,
        )

    def _batch(self, builder: StepBuilder) -> Batch:
        """Returns the batch of all members while they stay the same; caches others for a while."""
        if builder.members < len(builder.rows):
            return self._batches(tuple(builder.rows))
        if self._members.batch is None:
            self._members.batch = Batch(tuple(builder.rows))
        return self._members.batch

    # -- after a step

    def _settle(
        self, rows: ScheduledRows, cached_len: int, accepted: Sequence[Accepted]
    ) -> list[Request]:
        """Stores token values, makes keys matchable, and forks completions at the prompt's end."""
        request, spec, at = rows.request, rows.request.spec, rows.known_len(cached_len)
        if rows.cross_new:
            return []
        reason = None if rows.samples or at < len(request.tokens) else "length"
        if accepted and rows.parents is None and len(accepted[0].token_ids) > 1:
            rule = "a step gives a request several tokens only for a draft"
            raise RuleError(rule, f"{len(accepted[0].token_ids)} from one row", "Propose a tree")
        if accepted:
            kept, reason = accepted[0].cut(len(spec.prompt) + spec.max_new_tokens - at)
            request.tokens[at : at + 1] = kept
        if rows.table is not None and rows.table is request.table:
            self._keep(rows, cached_len, accepted)
        first = [Accepted()] * rows.samples if spec.items else accepted
        forks = [self._fork(request, i, first[i]) for i in range(1, rows.samples)]
        if rows.samples and spec.items:
            reason = request.begin_item()
        if reason is not None:
            self._end(request, reason)
        elif request.table is not None and request.decodes and request.left > 0:
            self._members.add(request)
        return [each for each in (request, *forks) if each.finish is not None]

    def _until_len(self, request: Request) -> int:
        """Returns below which length its pages last and nothing ends or turns matchable; or 0."""
        spec, table, node = request.spec, request.table, request.node
        if table is None or table.pending:
            return 0
        until_len = min(request.room, len(spec.prompt) + spec.max_new_tokens - 2)
        keys = min(request.cached_len, table.draft_len) if spec.draft else request.cached_len
        if node is not None and node.end + self.tree.unit <= keys:
            until_len = min(until_len, request.cached_len + 1)  # its last key is not settled
        return until_len

    def _store(self, request: Request) -> None:
        """Makes the keys of settled rows matchable, in whole blocks."""
        table, node, settled_len = request.table, request.node, request.settled_len
        if node is None or table is None or table.pending:
            return
        if request.spec.draft:
            settled_len = min(settled_len, table.draft_len)
        if settled_len >= node.end + self.tree.unit:
            request.node = self.tree.insert(node, request.tokens, table, settled_len)

    def _keep(self, rows: ScheduledRows, cached_len: int, accepted: Sequence[Accepted]) -> None:
        """Makes the keys of settled rows matchable; a tree's keys move with the next step."""
        request, table = rows.request, rows.table
        assert table is not None, "a request that lost its pages has nothing to keep"
        if rows.parents is None:
            request.settled_len = cached_len + rows.new_len
        else:
            nodes = accepted[0].nodes
            if len(nodes) != len(accepted[0].token_ids):
                rule = "each accepted node of a tree gives one token"
                got = f"{len(accepted[0].token_ids)} tokens and {len(nodes)} nodes"
                raise RuleError(rule, got, "Name the path from the root on")
            if not rows.chain:  # keys already in place, before moves are pending
                request.settled_len = cached_len
                self._store(request)
                table.accept(cached_len, nodes)
            request.settled_len = request.cached_len = cached_len + len(nodes)
        self._store(request)

    def _fork(self, parent: Request, index: int, accepted: Accepted) -> Request:
        """Starts completion `index`: it continues from the parent's keys, or waits for room."""
        spec = parent.spec
        kept, reason = accepted.cut(spec.max_new_tokens)
        child = Request(spec, parent.arrival, index, kept)
        child.siblings, child.hit_len = parent.siblings, parent.hit_len
        child.scored_len = child.score_end
        if not parent.siblings:
            parent.siblings.append(parent)
        parent.siblings.append(child)
        if spec.items:
            reason = child.begin_item()
        child.finish = reason
        if reason is not None:
            return child
        table, room = parent.table, len(self.running) < self.config.max_running_requests
        if table is not None and room and self.tree.make_room(table.fork_needs(parent.cached_len)):
            child.table, child.encoded = table.fork(parent.cached_len), True
            child.cached_len = child.settled_len = parent.cached_len
            child.node = self.tree.lock(parent.node) if parent.node is not None else None
            insort(self.running, child)
            self.counters["forked"] += 1
        else:
            insort(self.waiting, child)
        return child

    def _preempt(self, request: Request) -> None:
        """Frees its pages and queues it; later it restarts from what is cached by then."""
        self.running.remove(request)
        self._release_request(request)
        self._members.update()
        request.encoded = not request.spec.encoder_ids
        insort(self.waiting, request)
        self.counters["preempted"] += 1

    def _end(self, request: Request, reason: str) -> None:
        for queue in (self.running, self.waiting, self.embeds):
            if request in queue:
                queue.remove(request)
        self._release_request(request)
        while request.tokens[-1] < 0:
            request.tokens.pop()  # of a step whose samples are dropped
        request.finish = reason
        self.ends += 1

    def _release_request(self, request: Request) -> None:
        """Gives up a request's pages and tree node; blocks in the tree stay cached."""
        self._members.remove(request)
        self._batches.cache_clear()
        self._store(request)
        if request.node is not None:
            self.tree.close(request.node)
        if request.table is not None:
            request.table.close()
        request.table = request.node = request.draft = request.last_tree = None
        request.cached_len = request.settled_len = request.room = 0
