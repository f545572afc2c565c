"""The engine: schedule, run, sample, commit, until nothing is left.

Puts together what knows nothing of each other: a scheduler without tensors, a model without
requests, a sampler without either. One step is one call of `step`; an error in one request ends
that request and nothing else.

Calls from several threads take turns. Every exception, wherever it strikes, leaves an engine that
answers right: jobs are changed by one frozen result per step, which can be written again;
everything else (pages, tree, queue, text streams) is suspect while `_changing` is set, and the next
call that finds it set makes it anew from the jobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.attention.select import select
from lockstep.config import EngineConfig
from lockstep.folder import has
from lockstep.kv.pages import PagePool
from lockstep.llm.calls import GONE, Caller, Turn, executing
from lockstep.llm.fingerprint import fingerprint
from lockstep.llm.job import Draft, Ending, Job, Score, ScoreUpdate, StepResult, TokenUpdate
from lockstep.llm.output import Chunk
from lockstep.llm.prompts import Prompt, params_for, token_ids
from lockstep.llm.prompts import items as item_forms
from lockstep.models import weights
from lockstep.models.weights import Info, Loaded
from lockstep.nn import linear
from lockstep.nn.decoder import Model
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import build
from lockstep.plan.step import StepPlan
from lockstep.run import memory
from lockstep.run.certify import Certificate, NotCertified, certify
from lockstep.run.kind import EMBED, ENCODE, GENERATE, group_specs, kinds_of
from lockstep.run.runner import Runner
from lockstep.sample.logits import Logprobs, Row
from lockstep.sample.params import SamplingParams, resolve_seed, whole
from lockstep.sample.sampler import log_probs, sample
from lockstep.sched.request import Ask, Piece, Step, Token
from lockstep.sched.scheduler import Limits, Scheduler
from lockstep.text.tokenizer import Tokenizer
from lockstep.types import INT32_MAX, RuleError, shown

NOBODY = Token(-1)  # an item's tokens are given
ITEM = SamplingParams(max_tokens=None, logprobs=True, seed=0)
BUILTIN = Path(__file__).parent.parent / "builtin"

Next = tuple[
    TokenUpdate | None, Token
]  # a draft's next token, None if none could be sampled; and what the scheduler is told


@dataclass(frozen=True, eq=False)
class Parts:
    """What an engine is made of, ready and proven on this machine; several engines may share it."""

    model: Model
    info: Info
    tokenizer: Tokenizer | None
    backend: Backend
    why: str
    certificate: Certificate


def load(config: EngineConfig) -> Parts:
    """The model from its folder or hub id, or the built-in one, with the first GEMM that this
    machine proves sound, and a backend."""
    refused: list[RuleError] = []
    for gemm in linear.kernels(config.device):
        model, info = weights.load(
            config.model or BUILTIN,
            config.device,
            config.dtype,
            gemm=gemm,
            context_length=config.context_length,
        )
        tokenizer = (
            Tokenizer.from_folder(info.folder) if has(info.folder, "tokenizer.json") else None
        )
        try:
            return prepare(Loaded(model, info), tokenizer, config)
        except NotCertified as error:
            refused.append(error)
    raise refused[-1]


def prepare(
    loaded: Loaded, tokenizer: Tokenizer | None, config: EngineConfig | None = None
) -> Parts:
    """Chooses a backend and proves that rows do not depend on their neighbours."""
    model, info = loaded
    config = config or EngineConfig()
    backend, why = select(
        config.attention_backend, model.groups(config.page_size, config.kv_cache_dtype), "cpu"
    )
    return Parts(model, info, tokenizer, backend, why, certify(model, backend, info, config))


class Engine:
    """A model, its cache and its queue. `add` jobs, call `step` while `busy`. `told` says what was
    chosen at start, and why."""

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self.info, self.tokenizer = parts.info, parts.tokenizer
        self.context_length = config.context_length or self.info.max_position
        if self.context_length > self.info.max_position:
            rule = f"context_length is at most the model's {self.info.max_position} positions"
            raise RuleError(rule, str(config.context_length), "Leave it out, or lower it")
        self.kinds = kinds_of(parts.model, parts.info, config.page_size, config.kv_cache_dtype)
        self.specs = group_specs(self.kinds.values())
        sizes = memory.size(self.specs, config, self.context_length)
        buckets = Buckets(config.bucket_sizes) if config.bucket_sizes is not None else None
        self.runner = Runner(self.specs, sizes.pages, parts.backend, buckets)
        self._num_pages = sizes.pages
        self.scheduler = self._new_scheduler()
        name = parts.why.partition(":")[0]
        self.fingerprint = fingerprint(
            name, parts.backend, self.info, config.kv_cache_dtype, parts.certificate
        )
        self.jobs: dict[int, Job] = {}
        self.told = f"attention {parts.why}; gemm {self.info.gemm}; {sizes.text}"
        self._turns: list[Turn] = []
        self._changing = False  # set while anything but the jobs may be half changed
        self._settled: StepResult | None = (
            None  # a step that has happened, until its jobs have it all
        )

    @property
    def busy(self) -> bool:
        """Whether somebody waits for an answer."""
        with Turn(self._turns):
            self._tidy(thorough=True)
            return bool(self.jobs)

    def add(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams | None = None,
        embed: bool = False,
        scores_only: bool = False,
        *,
        priority: int = 0,
        tenant: str = "",
        caller: Caller | None = None,
    ) -> Job:
        """Takes a prompt in, or says why not. `embed` and `scores_only` ask for no new tokens. An
        encoder's prompt is its source.

        Of a higher `priority` goes first; what is cached is shared within a `tenant` only. A job
        leaves with its `caller`; without one it stays until it has ended or is aborted.
        """
        ids, source = self._placed(self._checked(prompt_ids))
        (params,) = params_for(params, 1)
        params.check_vocab(self.info.vocab_size)
        if source and params.top_prompt_logprobs is not None:
            raise RuleError(
                "a prompt is scored by a decoder",
                "an encoder-decoder",
                "Score items that follow the prompt",
            )
        if source and embed:
            raise RuleError(
                "embeddings come from decoders and encoders",
                "an encoder-decoder",
                "Use it for generation",
            )
        if not isinstance(tenant, str):
            raise RuleError(
                "a tenant is named by a string", shown(tenant), "Leave it out where there is one"
            )
        room = self.context_length - len(ids)
        new = 0 if embed or scores_only else params.new_len(room)
        if new > room:
            rule = f"prompt and new tokens fit into the context of {self.context_length}"
            raise RuleError(
                rule,
                f"{len(ids)} + {new}",
                f"Use max_tokens of at most {max(room, 0)}, or a shorter prompt",
            )
        ask = Ask(
            prompt=ids,
            max_new_tokens=new,
            n=params.n,
            priority=whole(
                "priority",
                priority,
                -INT32_MAX,
                INT32_MAX,
                "0 is everybody's, a higher one goes first",
            ),
            wants_prompt_logprobs=params.top_prompt_logprobs is not None,
            encoder_ids=source,
            tenant=tenant,
            embed=embed,
        )
        return self._take(ask, resolve_seed(params), caller)

    def add_items(
        self,
        prompt_ids: Sequence[int],
        items: Sequence[Sequence[int]],
        *,
        caller: Caller | None = None,
    ) -> Job:
        """Takes one prompt and several continuations in, whose log-probabilities are wanted: one
        draft each, one prompt."""
        ids, source = self._placed(self._checked(prompt_ids))
        given = tuple(self._checked(item) for item in item_forms(items))
        longest = max(map(len, given), default=0)
        if not given or len(ids) + longest > self.context_length:
            rule = (
                "there is an item, and prompt and item fit into the context of "
                f"{self.context_length}"
            )
            raise RuleError(
                rule, f"{len(given)} items, {len(ids)} + {longest} tokens", "Shorten it"
            )
        return self._take(Ask(ids, 0, encoder_ids=source, items=given), ITEM, caller)

    def _take(self, ask: Ask, params: SamplingParams, caller: Caller | None) -> Job:
        with Turn(self._turns):
            self._tidy()
            self.scheduler.refuse(ask)
            self._changing = True
            request = self.scheduler.add(ask)
            job = self.jobs[request.arrival] = Job(params, request, self.tokenizer, caller)
            self._changing = False
            return job

    def _placed(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(what the decoder begins with, what the encoder reads)."""
        if ENCODE not in self.kinds:
            return ids, ()
        start = self.info.decoder_start_token_id
        if start is None:
            raise RuleError(
                "an encoder-decoder's config names decoder_start_token_id",
                "none",
                "Add it to config.json",
            )
        return (start,), ids

    def abort(self, job: Job) -> None:
        """Ends a job now; what it has so far stays readable."""
        job.caller = GONE
        with Turn(self._turns):
            self._tidy()

    def step(self) -> list[Job]:
        """One step. Returns the jobs that it touched; those that are done have left the engine."""
        with Turn(self._turns):
            self._tidy()
            self._changing = True
            step = self.scheduler.schedule()
            touched = self._run(step) if step is not None else []
            self._changing = False
            return touched

    def news(self, job: Job) -> tuple[list[Chunk], bool]:
        """What came for a job since the last call, and whether that was all."""
        with Turn(self._turns):
            self._tidy()
            return job.news(), job.done

    def check(self) -> None:
        """Every page is free, cached, or held by somebody whom somebody waits for."""
        with Turn(self._turns):
            self._tidy(thorough=True)
            self.scheduler.check()

    # -- one step

    def _run(self, step: Step) -> list[Job]:
        """Computes a step. Before `_settled` is set it has not happened, from then on it has."""
        result = self._compute(step)
        ended = self.scheduler.commit(step, result.sampled)
        touched = [self.jobs[p.request.arrival] for p in step.pieces]
        endings = [Ending(self.jobs[r.arrival].drafts[r.index], r.finish or "stop") for r in ended]
        settled = self._settled = replace(result, endings=(*result.endings, *endings))
        settled.write()
        settled.end()
        for job in touched:
            if job.done:
                self.jobs.pop(job.request.arrival, None)
        self._settled = None
        return touched

    def _plan(self, step: Step) -> tuple[StepPlan, Tensor]:
        ids = torch.tensor(
            [token for piece in step.pieces for token in piece.ids], dtype=torch.long
        )
        return build(step.kind.specs, step.works), ids

    def _compute(self, step: Step) -> StepResult:
        """What every piece gets: a step is of one kind. No job is changed."""
        computed = {GENERATE: self._generate, ENCODE: self._encode, EMBED: self._embed}
        return computed[step.kind.name](step)

    def _encode(self, step: Step) -> StepResult:
        """Sources: no tokens, but keys for the decoder."""
        self.runner.run(*self._plan(step), step.kind)
        return StepResult(((),) * len(step.pieces))

    def _generate(self, step: Step) -> StepResult:
        out = self.runner.run(*self._plan(step), step.kind)
        return self._sampled(step, step.kind.model.logits(out.emitted))

    def _embed(self, step: Step) -> StepResult:
        """Whole requests: pooled rows, no tokens."""
        plan, ids = self._plan(step)
        hidden = self.runner.run(plan, ids, step.kind).rows
        vectors = step.kind.model.embed(hidden, plan.q_indptr.tolist())
        jobs = [self.jobs[piece.request.arrival] for piece in step.pieces]
        embeddings = tuple((job, vector.numpy()) for job, vector in zip(jobs, vectors, strict=True))
        return StepResult(((),) * len(step.pieces), embeddings=embeddings)

    def _sampled(self, step: Step, logits: Tensor) -> StepResult:
        """Scores the prompt rows, samples the others: the next token of every draft."""
        rows, at, wanted, begin = list[Row](), list[int](), list[Draft](), 0
        scores: list[ScoreUpdate] = []
        for piece in step.pieces:
            job, scored = self.jobs[piece.request.arrival], len(piece.emit) - piece.samples
            if scored:
                scores.append(self._score(job, piece, logits[begin : begin + scored]))
            given = bool(piece.request.ask.items)
            if given and piece.samples:
                scores += self._first_of_items(job, logits[begin + scored])
            for i in range(0 if given else piece.samples):
                index = i if piece.samples > 1 else piece.request.index
                rows.append(self._row(job, piece, index))
                at.append(begin + scored + i)
                wanted.append(job.drafts[index])
            begin += len(piece.emit)
        updates, endings = self._choose(logits, at, rows, wanted)
        return StepResult(
            _by_piece(step, updates),
            tuple(u for u, _ in updates if u),
            tuple(scores),
            endings=endings,
        )

    def _row(self, job: Job, piece: Piece, index: int) -> Row:
        draft, tokens = job.drafts[index], piece.request.tokens
        history = np.array(tokens, np.int32) if draft.params.penalised else np.empty(0, np.int32)
        return Row(draft.params, len(tokens), len(job.prompt_ids), history)

    def _choose(
        self, logits: Tensor, at: list[int], rows: list[Row], wanted: list[Draft]
    ) -> tuple[list[Next], tuple[Ending, ...]]:
        """The next token of every wanted draft, and what goes wrong with some of them."""
        if not rows:
            return [], ()
        chosen = sample(
            logits if len(at) == len(logits) else logits[at], rows, self.info.eos_token_ids
        )
        errors, told = (
            chosen.errors(),
            dict(zip(chosen.logprob_rows, range(len(rows)), strict=False)),
        )
        out: list[Next] = []
        for r, (draft, token_id) in enumerate(zip(wanted, chosen.token_ids.tolist(), strict=True)):
            if r in errors:
                out.append((None, Token(0, True)))
                continue
            count = len(draft.token_ids)
            text, ends = draft.feed(token_id, count + 1, self.info.eos_token_ids)
            scores: tuple[Score, ...] = ()
            if r in told and chosen.logprobs is not None:
                scores = (_entry(chosen.logprobs, told[r], draft.params.top_logprobs or 0),)
            out.append((TokenUpdate(draft, count, token_id, text, scores), Token(token_id, ends)))
        return out, tuple(Ending(wanted[r], "error", why) for r, why in errors.items())

    def _score(self, job: Job, piece: Piece, logits: Tensor) -> ScoreUpdate:
        """The row at position p tells of token p+1, of the prompt or of an item."""
        items, index = piece.request.ask.items, piece.request.index
        first, k = piece.cached_len + piece.emit[0] + 1, job.params.top_prompt_logprobs or 0
        ids, target, begin = job.prompt_ids, job.prompt_scores, 1
        if items:
            ids, target, begin = (*ids, *items[index]), job.drafts[index].scores, len(ids)
        told = log_probs(logits, torch.tensor(ids[first : first + len(logits)]), k)
        return ScoreUpdate(
            target, first - begin, tuple(_entry(told, i, k) for i in range(len(logits)))
        )

    def _first_of_items(self, job: Job, logits: Tensor) -> list[ScoreUpdate]:
        """The prompt's last row tells of the first token of every item."""
        items = job.request.ask.items
        told = log_probs(logits.expand(len(items), -1), torch.tensor([item[0] for item in items]))
        return [
            ScoreUpdate(draft.scores, 0, (_entry(told, i, 0),))
            for i, draft in enumerate(job.drafts)
        ]

    # -- between calls

    def _tidy(self, thorough: bool = False) -> None:
        """What the calls before left: something half changed, or jobs that nobody waits for.

        Where all jobs are of one caller, it is the one that calls now; `thorough` looks even then.
        """
        if self._changing:
            self._recover()
        callers = {job.caller for job in self.jobs.values()}
        if thorough or len(callers) > 1 or GONE in callers:
            for job in self._abandoned():
                self._changing = True
                self.scheduler.abort(job.request)
                job.end("abort")
                self.jobs.pop(job.request.arrival, None)
                self._changing = False

    def _abandoned(self) -> list[Job]:
        owned = [job for job in self.jobs.values() if job.caller is not None]
        frames = executing() if owned else set()
        return [job for job in owned if job.caller is not None and job.caller.gone(frames)]

    def _recover(self) -> None:
        """Pages, tree, queue and text streams anew, from the jobs: all of them as if they had been
        preempted. The cache is forgotten.

        Changes nothing that it reads before `_changing` is unset, so it can be left anywhere and
        begun again.
        """
        settled = self._settled
        if settled is not None:
            settled.write()
        for job in self.jobs.values():
            job.replay(self.info.eos_token_ids)
        if settled is not None:
            settled.end()
        for job in self._abandoned():
            job.end("abort")
        jobs = {number: job for number, job in self.jobs.items() if not job.done}
        scheduler = self._new_scheduler(self.scheduler.arrivals)
        for job in jobs.values():
            scheduler.resume(job.resumed())
        scheduler.counters.update(self.scheduler.counters, recovered=1)
        self.jobs, self.scheduler = jobs, scheduler
        self._settled = None
        self._changing = False

    def _new_scheduler(self, arrivals: int = 0) -> Scheduler:
        pools = [PagePool(n) if n else None for n in self._num_pages]
        return Scheduler(self.kinds, pools, limits_of(self.config), arrivals)

    def _checked(self, prompt_ids: Prompt) -> tuple[int, ...]:
        ids = token_ids(prompt_ids, self.info.vocab_size)
        if not ids:
            raise RuleError(
                "a prompt has at least one token", "an empty prompt", "Start with some text"
            )
        if len(ids) > self.context_length:
            raise RuleError(
                f"a prompt has at most {self.context_length} tokens", str(len(ids)), "Shorten it"
            )
        return ids


def limits_of(config: EngineConfig) -> Limits:
    """What the options say about steps."""
    return Limits(
        config.chunked_prefill_size, config.max_running_requests, not config.disable_radix_cache
    )


def _by_piece(step: Step, updates: Sequence[Next]) -> tuple[tuple[Token, ...], ...]:
    """The tokens of every piece, in order; an item's are given."""
    tokens = iter([token for _, token in updates])
    return tuple(
        tuple([NOBODY if p.request.ask.items else next(tokens) for _ in range(p.samples)])
        for p in step.pieces
    )


def _entry(told: Logprobs, row: int, k: int) -> Score:
    best = zip(told.top_ids[row, :k].tolist(), told.top[row, :k].tolist(), strict=True)
    return float(told.chosen[row]), tuple(best)
