"""The scheduler: continuous batching over pages that may run out.

`schedule` decides a step and reserves its pages; `commit` takes what the step sampled, and only
then do lengths grow and pages become matchable. One step at a time: nothing that a running step
reads is freed before it is committed. Rows of decoding requests go first, prompts fill the rest of
the budget in chunks, encoders and embeddings have whole steps of their own. When pages are short,
cached ones are evicted, then the worst-ranked request is preempted: its pages go, and it is
computed again later, to the same bits.

Knows lengths, pages and order (`policy`), never a tensor or what a token means.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lockstep.kv.pages import PagePool
from lockstep.kv.prefix import Prefix
from lockstep.kv.tables import Table, pages_for, peak_pages
from lockstep.plan.build import Work
from lockstep.run.kind import EMBED, ENCODE, GENERATE, StepKind, group_specs
from lockstep.sched import policy
from lockstep.sched.request import LAST, Ask, Piece, Request, Sampled, Step, Token
from lockstep.types import INT32_MAX, Layout, OutOfPages, RuleError


@dataclass(frozen=True)
class Limits:
    """How much a step may hold. `chunked_prefill_size` bounds its rows, decoding ones included, and
    its emitted rows."""

    chunked_prefill_size: int = 512
    max_running_requests: int = 64
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if min(self.chunked_prefill_size, self.max_running_requests) < 1:
            sizes = f"{self.chunked_prefill_size} and {self.max_running_requests}"
            raise RuleError(
                "chunked_prefill_size and max_running_requests are at least 1",
                sizes,
                "Raise the one below 1",
            )


class _Draft:
    """A step in the making: what it has room for, and what is in it."""

    def __init__(self, size: int) -> None:
        self.tokens = self.emits = size
        self.pieces: list[Piece] = []

    def step_on(self, request: Request) -> bool:
        """The one row of a request below its quiet length, if there is room for it."""
        if request.cached_len >= request.quiet or not self.tokens or not self.emits:
            return False
        self.tokens -= 1
        self.emits -= 1
        self.pieces.append(Piece(request, (request.tokens[-1],), request.cached_len, LAST, 1))
        return True

    def add(self, piece: Piece) -> None:
        self.tokens -= piece.new_len
        self.emits -= len(piece.emit)
        self.pieces.append(piece)


class Scheduler:
    """`add` and `abort` requests at any time; `schedule` a step, run it, `commit` it; again until
    `schedule` returns None."""

    def __init__(
        self,
        kinds: Mapping[str, StepKind],
        pools: Sequence[PagePool | None],
        limits: Limits,
        arrivals: int = 0,
    ) -> None:
        self.kinds, self.pools, self.limits = kinds, tuple(pools), limits
        self.specs = group_specs(kinds.values())
        self.tree = Prefix(self.specs, pools)
        self.running: list[Request] = []  # by rank, like the next two
        self.waiting: list[Request] = []
        self.embeds: list[Request] = []
        self.counters: Counter[str] = Counter()
        self.arrivals = arrivals  # requests that came so far: the next one's number
        self._flight: Step | None = None
        self._after_whole = False
        self._blocked = False  # the head of the queue found no room in the last step
        generating = kinds[GENERATE].groups if GENERATE in kinds else ()
        self._stored = tuple(g for g in generating if self.specs[g].layout is not Layout.CROSS)

    def add(self, ask: Ask) -> Request:
        """Takes a request in, or refuses one that could never run."""
        self.refuse(ask)
        request = Request(ask, self.arrivals)
        self.arrivals += 1
        self.resume([request])
        return request

    def resume(self, requests: Iterable[Request]) -> None:
        """Requests that hold nothing here join the queue: new ones, or those of a scheduler that is
        no more."""
        for request in requests:
            insort(self.embeds if request.ask.embed else self.waiting, request, key=policy.rank)

    def abort(self, request: Request) -> list[Request]:
        """Ends a request and its siblings. Those in a running step end when it is committed;
        returns the others."""
        flying = (
            {piece.request for piece in self._flight.pieces} if self._flight is not None else set()
        )
        done = []
        for member in request.family:
            if member.finish is None and member in flying:
                member.aborted, member.quiet = True, 0
            elif member.finish is None:
                done.append(self._end(member, "abort"))
        return done

    def schedule(self) -> Step | None:
        """The next step, its pages reserved; None if there is nothing to do."""
        if self._flight is not None:
            raise RuleError(
                "a step is committed before the next one is scheduled",
                "one still running",
                "Commit it, or drop it",
            )
        self._displace()
        tries = [self._generate, self._whole]
        if policy.whole_first(
            self._after_whole, bool(self.embeds or (self.waiting and not self.waiting[0].encoded))
        ):
            tries.reverse()
        step = tries[0]() or tries[1]()
        assert step is not None or not (self.running or self.waiting or self.embeds), (
            f"{len(self.running)} running and no step"
        )
        self._flight = step
        return step

    def commit(self, step: Step, sampled: Sampled) -> list[Request]:
        """The step has run; `sampled[i]` holds the tokens of piece i. Returns the requests that
        ended with it."""
        want, got = [piece.samples for piece in step.pieces], list(map(len, sampled))
        if want != got:
            raise RuleError(
                f"the pieces of this step have {want} samples",
                f"{got} tokens",
                "Sample the last rows of each piece's emit",
            )
        self._land(step)
        done: list[Request] = []
        for piece, tokens in zip(step.pieces, sampled, strict=True):
            request = piece.request
            if request.cached_len < request.quiet and not tokens[0].stop:
                request.cached_len += 1
                request.tokens.append(tokens[0].id)
            elif request.aborted:
                done.append(self._end(request, "abort"))
            elif request.ask.embed:
                done.append(self._end(request, "length"))
            elif piece.cross_new:
                request.encoded = True
            else:
                done += self._advance(piece, tokens)
        return done

    def drop(self, step: Step) -> list[Request]:
        """The step did not run, and nothing of it counts. Returns the requests that were aborted
        meanwhile."""
        self._land(step)
        done = [self._end(piece.request, "abort") for piece in step.pieces if piece.request.aborted]
        for piece in step.pieces:
            if piece.request.running and not piece.request.encoded:
                self._preempt(piece.request)
            elif piece.request.ask.embed and piece.request.finish is None:
                insort(self.embeds, piece.request, key=policy.rank)
        return done

    def check(self) -> None:
        """free + cached + held = all, in every group."""
        self.tree.check(r.table for r in self.running if r.table is not None)

    def _land(self, step: Step) -> None:
        if step is not self._flight:
            raise RuleError(
                "the step that was scheduled last is committed, once",
                "another one",
                "Commit what schedule returned",
            )
        self._flight = None

    # -- admission

    def refuse(self, ask: Ask) -> None:
        """Everything that could never run is said here, with both numbers, and not found out by
        waiting forever."""
        wanted = {EMBED if ask.embed else GENERATE: "embeddings" if ask.embed else "generation"}
        if ask.encoder_ids:
            wanted[ENCODE] = "an encoder"
        for name, what in wanted.items():
            if name not in self.kinds:
                raise RuleError("a model does what it has layers for", what, "Use another model")
        size = self.limits.chunked_prefill_size
        whole = len(ask.prompt) if ask.embed else len(ask.encoder_ids)
        if whole > size:
            rule = f"an embedding or an encoder is computed in one step, at most {size} tokens"
            raise RuleError(rule, f"{whole}", "Shorten it, or raise chunked_prefill_size")
        if ask.continuations > size:
            got = f"{ask.continuations} completions or items"
            raise RuleError(
                f"a step emits at most {size} rows",
                got,
                "Ask for fewer, or raise chunked_prefill_size",
            )
        for g in () if ask.embed else self.kinds[GENERATE].groups:
            need, pool = self._least(ask, g), self.pools[g]
            if pool is not None and need > pool.num_pages - 1:
                rule = (
                    f"a request fits into the cache alone: group {g} has {pool.num_pages - 1} "
                    f"pages of {self.specs[g].page_size}"
                )
                got = f"{ask.max_keys} keys, which need {need}"
                raise RuleError(
                    rule, got, "Shorten the prompt, lower max_tokens, or give the cache more memory"
                )

    def _least(self, ask: Ask, g: int) -> int:
        """Pages of group g without which a request cannot end."""
        spec = self.specs[g]
        return (
            pages_for(len(ask.encoder_ids), spec)
            if spec.layout is Layout.CROSS
            else peak_pages(spec, ask.max_keys, 1)
        )

    def _admit(self, request: Request) -> bool:
        """Gives the head of the queue a table, with the longest cached prefix in it, if there is
        room for all its known tokens."""
        self._blocked = True
        if len(self.running) >= self.limits.max_running_requests:
            return False
        table, path = Table(self.specs, self.pools), None
        if self.limits.prefix_cache:
            path = self.tree.match(request.ask.root, request.tokens, table, request.matchable)
        request.table, request.path = table, path
        if self.running and not self._fits(request, table):
            self._let_go(request)
            return False
        self._blocked = False
        request.cached_len = path.length if path is not None else 0
        if request.hit_len is None:
            request.hit_len = request.cached_len
        self.counters["hit_tokens"] += request.cached_len
        self.waiting.remove(request)
        insort(self.running, request, key=policy.rank)
        return True

    def _fits(self, request: Request, table: Table) -> bool:
        """Room for all its known tokens, and one page more for everyone who runs: who enters should
        not be thrown out at once."""
        for g in self.kinds[GENERATE].groups:
            spec = self.specs[g]
            need = (
                peak_pages(spec, len(request.tokens), self.limits.chunked_prefill_size)
                - len(table.held(g))
                + len(self.running)
            )
            if spec.layout is Layout.CROSS:
                need = pages_for(len(request.ask.encoder_ids), spec)
            if need > self.tree.available(g):
                return False
        return True

    def _displace(self) -> None:
        """If the head of the queue found no room, one request of lower priority makes way."""
        if self._blocked and self.waiting:
            victim = policy.displaced(self.running, self.waiting[0])
            if victim is not None:
                self._preempt(victim)
        self._blocked = False

    # -- steps

    def _generate(self) -> Step | None:
        """Rows of running requests by turn, then of waiting ones by rank: nobody is admitted past
        one who is held up."""
        draft, held_up = _Draft(self.limits.chunked_prefill_size), False
        self._evict_ahead()
        for request in policy.turns(self.running):
            if (
                not draft.step_on(request)
                and request.table is not None
                and not self._place(request, draft)
            ):
                held_up = True
                if request.rows > 1:
                    break
        while self.waiting and not held_up and draft.tokens and self.waiting[0].encoded:
            head = self.waiting[0]
            held_up = not self._admit(head) or not self._place(head, draft)
        return self._step(GENERATE, draft)

    def _place(self, request: Request, draft: _Draft) -> bool:
        """As many rows of a request as the step and the pages allow; worse-ranked requests give way
        if not even one fits."""
        want = policy.rows(request, draft.tokens, draft.emits)
        while want:
            new_len = (
                want if request.cached_len + want <= request.room else self._reserve(request, want)
            )
            if new_len:
                draft.add(request.piece(new_len))
                return True
            victim = policy.victim(self.running, request, {piece.request for piece in draft.pieces})
            if victim is None:
                return False
            self._preempt(victim)
        return False

    def _evict_ahead(self) -> None:
        """One eviction, if there is something to evict, for everyone who outgrows his pages: at
        most a page each and group."""
        grown = sum([request.cached_len >= request.room for request in self.running])
        if grown:
            self.tree.make_room([grown * (g in self._stored) for g in range(len(self.specs))])

    def _reserve(self, request: Request, want: int) -> int:
        """Pages for up to `want` rows more, after those that left the window; returns for how
        many."""
        table, begin, cross_len = request.table, request.cached_len, len(request.ask.encoder_ids)
        assert table is not None, "a request without a table has no turn"
        table.release(begin)
        try:
            table.reserve(begin + want, cross_len=cross_len)
        except OutOfPages:
            want = min(
                want, min(table.room(g, self.tree.available(g)) for g in self._stored) - begin
            )
            if want < 1 or not self.tree.make_room(table.needs(begin + want, cross_len=cross_len)):
                return 0
            table.reserve(begin + want, cross_len=cross_len)
        request.room = min([table.room(g, 0) for g in self._stored])
        request.quiet = self._quiet(request, table)
        return want

    def _whole(self) -> Step | None:
        """A step of embeddings, or of encoders: whichever kind's head has the better rank and finds
        room."""
        encoders = [self.waiting[0]] if self.waiting and not self.waiting[0].encoded else []
        heads = sorted([*self.embeds[:1], *encoders], key=policy.rank)
        for head in heads:
            step = self._embed() if head.ask.embed else self._encode()
            if step is not None:
                return step
        return None

    def _embed(self) -> Step | None:
        draft = _Draft(self.limits.chunked_prefill_size)
        while (
            self.embeds
            and len(self.embeds[0].ask.prompt) <= draft.tokens
            and len(draft.pieces) < self.limits.max_running_requests
        ):
            request = self.embeds.pop(0)
            draft.add(Piece(request, request.ask.prompt, 0, (len(request.ask.prompt) - 1,), 0))
        return self._step(EMBED, draft)

    def _encode(self) -> Step | None:
        """Encoders of the requests at the head of the queue, which run from now on."""
        draft = _Draft(self.limits.chunked_prefill_size)
        while (
            self.waiting
            and not self.waiting[0].encoded
            and len(self.waiting[0].ask.encoder_ids) <= draft.tokens
        ):
            request = self.waiting[0]
            if not self._admit(request):
                break
            ids, table = request.ask.encoder_ids, request.table
            assert table is not None, "an admitted request has a table"
            table.reserve(0, cross_len=len(ids))
            draft.add(Piece(request, ids, 0, (), 0, len(ids)))
        return self._step(ENCODE, draft)

    def _step(self, name: str, draft: _Draft) -> Step | None:
        if not draft.pieces:
            return None
        self._after_whole = name != GENERATE
        kind, works = self.kinds[name], []
        groups, none = kind.groups, (None,) * len(kind.groups)
        for request, ids, cached_len, emit, _, cross_new in draft.pieces:
            pages = request.table.views(groups) if request.table is not None else none
            works.append(
                Work(
                    cached_len, len(ids), pages, emit, None, len(request.ask.encoder_ids), cross_new
                )
            )
        return Step(kind, tuple(draft.pieces), tuple(works))

    # -- after a step

    def _advance(self, piece: Piece, tokens: Sequence[Token]) -> list[Request]:
        """Keys are committed: they may be matched, the window moves on, and the sampled tokens
        follow; at a prompt's end, n of them."""
        request, table = piece.request, piece.request.table
        assert table is not None, "a request in a step has a table"
        if table.pending:
            table.moved()
        request.cached_len += len(piece.ids)
        if request.ask.wants_prompt_logprobs:
            request.scored_len = max(
                request.scored_len, min(request.cached_len, len(request.ask.prompt) - 1)
            )
        elif request.ask.items:
            request.scored_len = request.cached_len
        if request.path is not None:
            self.tree.insert(request.path, request.tokens, table, request.cached_len)
        forks = (
            [self._fork(request, i, token) for i, token in enumerate(tokens[1:], 1)]
            if len(tokens) > 1
            else []
        )
        done = [child for child in forks if child.finish is not None]
        request.tokens += _begin(request.ask, 0, tokens[0]) if tokens else []
        reason = self._reason(request, tokens[0] if tokens else Token(-1))
        request.quiet = self._quiet(request, table)
        return [self._end(request, reason), *done] if reason else done

    def _quiet(self, request: Request, table: Table) -> int:
        """Up to where nothing can happen to a decoding request: its pages last, no block is whole,
        and it does not end."""
        ask, known = request.ask, len(request.tokens)
        if (
            known - request.cached_len != 1
            or known == len(ask.prompt)
            or ask.items
            or table.pending
        ):
            return 0
        block = request.path.node.end + self.tree.unit if request.path is not None else INT32_MAX
        end = len(ask.prompt) + ask.max_new_tokens - 1
        return min(request.room, block - 1, end - 1)

    def _reason(self, request: Request, token: Token) -> str | None:
        """Why a request ends here, if it does."""
        if token.stop:
            return "stop"
        if request.ask.items:
            whole = not request.rows or (
                request.index and len(request.tokens) == len(request.ask.prompt)
            )
            return "length" if whole else None
        new_tokens = len(request.tokens) - len(request.ask.prompt)
        return (
            "length"
            if new_tokens >= request.ask.max_new_tokens and (new_tokens or not request.rows)
            else None
        )

    def _fork(self, parent: Request, index: int, token: Token) -> Request:
        """Completion `index`, which begins with `token`: it runs on from the parent's keys, or
        waits if there is no room."""
        child = Request(parent.ask, parent.arrival, index, _begin(parent.ask, index, token))
        child.family, child.hit_len, child.encoded = (
            parent.family,
            parent.hit_len,
            not parent.ask.encoder_ids,
        )
        child.scored_len = parent.scored_len
        parent.family.append(child)
        child.finish = self._reason(child, token)
        if child.finish is not None:
            return child
        partial = [
            int(g in self._stored and parent.cached_len % spec.page_size > 0)
            for g, spec in enumerate(self.specs)
        ]
        if (
            len(self.running) < self.limits.max_running_requests
            and parent.table is not None
            and self.tree.make_room(partial)
        ):
            child.table, child.cached_len, child.encoded = (
                parent.table.fork(parent.cached_len),
                parent.cached_len,
                True,
            )
            child.path = self.tree.fork(parent.path) if parent.path is not None else None
            insort(self.running, child, key=policy.rank)
            self.counters["forked"] += 1
        else:
            insort(self.waiting, child, key=policy.rank)
        return child

    def _preempt(self, request: Request) -> None:
        """Its pages go; it waits, and is computed again from what is cached by then."""
        self.running.remove(request)
        self._let_go(request)
        request.encoded = not request.ask.encoder_ids
        insort(self.waiting, request, key=policy.rank)
        self.counters["preempted"] += 1

    def _end(self, request: Request, reason: str) -> Request:
        for queue in (self.running, self.waiting, self.embeds):
            if request in queue:
                queue.remove(request)
        self._let_go(request)
        request.finish = reason
        return request

    def _let_go(self, request: Request) -> None:
        """Holds on pages end with the request's turn; what the tree has stays there."""
        if request.path is not None:
            self.tree.close(request.path)
        if request.table is not None:
            request.table.close()
        request.table, request.path = None, None
        request.cached_len = request.room = request.quiet = 0


def _begin(ask: Ask, index: int, token: Token) -> list[int]:
    """What follows the prompt of a continuation: the token that was chosen, or the rows of an item,
    whose last token is not computed."""
    return list(ask.items[index][:-1]) if ask.items else [token.id]
