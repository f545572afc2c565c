"""The engine: schedule, run, sample, commit, until nothing is left.

Puts together what knows nothing of each other: a scheduler without tensors, a model without requests, a sampler without either. One
step is one call of `step`; an error in one request ends that request and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.attention.base import Backend
from lockstep.attention.select import select
from lockstep.config import EngineConfig
from lockstep.folder import has
from lockstep.kv.pages import PagePool
from lockstep.llm.fingerprint import fingerprint
from lockstep.llm.job import Job
from lockstep.llm.output import Top
from lockstep.llm.prompts import token_ids
from lockstep.models import weights
from lockstep.models.weights import Info, Loaded
from lockstep.nn import linear
from lockstep.nn.decoder import Model
from lockstep.plan.bucket import Buckets
from lockstep.plan.build import build
from lockstep.plan.step import StepPlan
from lockstep.run import memory
from lockstep.run.certify import Certificate, NotCertified, certify
from lockstep.run.groups import Groups, encoder_of
from lockstep.run.runner import Runner
from lockstep.sample.logits import Logprobs, Row
from lockstep.sample.params import SamplingParams, resolve_seed
from lockstep.sample.sampler import log_probs, sample
from lockstep.sched.request import Ask, Piece, Step, Token
from lockstep.sched.scheduler import Kinds, Limits, Scheduler
from lockstep.text.tokenizer import Tokenizer
from lockstep.types import RuleError

NOBODY = Token(-1)  # an item's tokens are given
ITEM = SamplingParams(max_tokens=None, logprobs=True, seed=0)
BUILTIN = Path(__file__).parent.parent / "builtin"


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
    """The model from its folder or hub id, or the built-in one, with the first GEMM that this machine proves sound, and a backend."""
    refused: list[RuleError] = []
    for gemm in linear.kernels(config.device):
        model, info = weights.load(config.model or BUILTIN, config.device, config.dtype, gemm=gemm, context_length=config.context_length)
        tokenizer = Tokenizer.from_folder(info.folder) if has(info.folder, "tokenizer.json") else None
        try:
            return prepare(Loaded(model, info), tokenizer, config.attention_backend)
        except NotCertified as error:
            refused.append(error)
    raise refused[-1]


def prepare(loaded: Loaded, tokenizer: Tokenizer | None, attention_backend: str | None = None) -> Parts:
    """Chooses a backend and proves that rows do not depend on their neighbours."""
    model, info = loaded
    backend, why = select(attention_backend, model.groups(), "cpu")
    return Parts(model, info, tokenizer, backend, why, certify(model, backend, info))


class Engine:
    """A model, its cache and its queue. `add` jobs, call `step` while `busy`. `told` says what was chosen at start, and why."""

    def __init__(self, config: EngineConfig, parts: Parts) -> None:
        self.config, self.parts = config, parts
        self.model, self.info, self.tokenizer = parts.model, parts.info, parts.tokenizer
        self.encoder = encoder_of(parts.model, self.info)
        self.context_length = min(config.context_length or self.info.max_position, self.info.max_position)
        groups = Groups.of(self.model, self.encoder, config.page_size, config.kv_cache_dtype)
        self.specs = groups.specs
        sizes = memory.size(groups.specs[: groups.cached], config, self.context_length)
        pages = (*sizes.pages, *(0 for _ in groups.specs[groups.cached :]))
        buckets = Buckets(config.bucket_sizes) if config.bucket_sizes is not None else None
        self.runner = Runner(self.model, self.specs, pages, parts.backend, buckets)
        pools = [PagePool(n) if n else None for n in pages]
        kinds = Kinds(groups.generate if self.info.generates else (), groups.encode, groups.embed)
        self.scheduler = Scheduler(self.specs, pools, kinds, limits_of(config))
        name, gemm = (why.partition(":")[0] for why in (parts.why, self.info.gemm))
        self.fingerprint = fingerprint(name, gemm, parts.backend, parts.certificate, self.info.rope_context)
        self.jobs: dict[int, Job] = {}
        self.told = f"attention {parts.why}; gemm {self.info.gemm}; {sizes.text}"

    @property
    def busy(self) -> bool:
        return bool(self.jobs)

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, embed: bool = False, scores_only: bool = False) -> Job:
        """Takes a prompt in, or says why not. `embed` and `scores_only` ask for no new tokens. An encoder's prompt is its source."""
        ids, source = self._placed(self._checked(prompt_ids))
        params.check_vocab(self.info.vocab_size)
        if source and params.top_prompt_logprobs is not None:
            raise RuleError("a prompt is scored by a decoder", "an encoder-decoder", "Score items that follow the prompt")
        if source and embed:
            raise RuleError("embeddings come from decoders and encoders", "an encoder-decoder", "Use it for generation")
        room = self.context_length - len(ids)
        new = 0 if embed or scores_only else params.new_len(room)
        if new > room:
            rule = f"prompt and new tokens fit into the context of {self.context_length}"
            raise RuleError(rule, f"{len(ids)} + {new}", f"Use max_tokens of at most {max(room, 0)}, or a shorter prompt")
        scored = params.top_prompt_logprobs is not None
        ask = Ask(ids, new, params.n, wants_prompt_logprobs=scored, encoder_ids=source, embed=embed)
        return self._take(ask, resolve_seed(params))

    def add_items(self, prompt_ids: Sequence[int], items: Sequence[Sequence[int]]) -> Job:
        """Takes one prompt and several continuations in, whose log-probabilities are wanted: one draft each, one prompt."""
        ids, source = self._placed(self._checked(prompt_ids))
        given = tuple(self._checked(item) for item in items)
        longest = max(map(len, given), default=0)
        if not given or len(ids) + longest > self.context_length:
            rule = f"there is an item, and prompt and item fit into the context of {self.context_length}"
            raise RuleError(rule, f"{len(given)} items, {len(ids)} + {longest} tokens", "Shorten it")
        return self._take(Ask(ids, 0, encoder_ids=source, items=given), ITEM)

    def _take(self, ask: Ask, params: SamplingParams) -> Job:
        request = self.scheduler.add(ask)
        job = self.jobs[request.arrival] = Job(params, request, self.tokenizer)
        return job

    def _placed(self, ids: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(what the decoder begins with, what the encoder reads)."""
        if self.encoder is None:
            return ids, ()
        start = self.info.decoder_start_token_id
        if start is None:
            raise RuleError("an encoder-decoder's config names decoder_start_token_id", "none", "Add it to config.json")
        return (start,), ids

    def abort(self, job: Job) -> None:
        """Ends a job now; what it has so far stays readable."""
        self.scheduler.abort(job.request)
        self._close(job, "abort")

    def step(self) -> list[Job]:
        """One step. Returns the jobs that it touched; those that are done have left the engine."""
        step = self.scheduler.schedule()
        if step is None:
            return []
        try:
            sampled = self._compute(step)
        except BaseException:
            self.scheduler.drop(step)
            raise
        touched = [self.jobs[p.request.arrival] for p in step.pieces if p.request.arrival in self.jobs]
        for request in self.scheduler.commit(step, sampled):
            job = self.jobs.get(request.arrival)
            if job is not None:
                job.drafts[request.index].end(request.finish or "stop")
        for job in touched:
            if job.done:
                self.jobs.pop(job.request.arrival, None)
        return touched

    def check(self) -> None:
        """When idle: every page is free or cached."""
        self.scheduler.check()

    def _plan(self, step: Step) -> tuple[StepPlan, Tensor]:
        ids = torch.tensor([token for piece in step.pieces for token in piece.ids], dtype=torch.long)
        return build([self.specs[g] for g in step.groups], step.works), ids

    def _compute(self, step: Step) -> list[list[Token]]:
        """The tokens of every piece: a step is of one kind."""
        if step.groups == self.scheduler.kinds.embed:
            return self._embed(step)
        return self._generate(step) if step.groups == self.scheduler.kinds.generate else self._encode(step)

    def _encode(self, step: Step) -> list[list[Token]]:
        """Sources: no tokens, but keys for the decoder."""
        assert self.encoder is not None, "only an encoder-decoder has encode steps"
        self.runner.rows(*self._plan(step), step.groups, self.encoder.encoder_places, self.encoder.encode)
        return [[] for _ in step.pieces]

    def _generate(self, step: Step) -> list[list[Token]]:
        hidden = self.runner.run(*self._plan(step), step.groups, self.model.places)
        return self._sampled(step, self.model.logits(hidden))

    def _embed(self, step: Step) -> list[list[Token]]:
        """Whole requests: pooled rows, no tokens."""
        plan, ids = self._plan(step)
        hidden = self.runner.rows(plan, ids, step.groups, self.model.places)
        vectors = self.model.embed(hidden, plan.q_indptr.tolist())
        for piece, vector in zip(step.pieces, vectors, strict=True):
            self.jobs[piece.request.arrival].embedding = vector.numpy()
        return [[] for _ in step.pieces]

    def _sampled(self, step: Step, logits: Tensor) -> list[list[Token]]:
        """Scores the prompt rows, samples the others, and tells every draft its next token."""
        rows, at, wanted, begin = [], [], [], 0
        for piece in step.pieces:
            job, scored = self.jobs[piece.request.arrival], len(piece.emit) - piece.samples
            if scored:
                self._score(job, piece, logits[begin : begin + scored])
            given = bool(piece.request.ask.items)
            if given and piece.samples:
                self._first_of_items(job, logits[begin + scored])
            for i in range(0 if given else piece.samples):
                index = i if piece.samples > 1 else piece.request.index
                rows.append(self._row(job, piece, index))
                at.append(begin + scored + i)
                wanted.append((job, index))
            begin += len(piece.emit)
        tokens = iter(self._choose(logits, at, rows, wanted))
        return [[NOBODY if piece.request.ask.items else next(tokens) for _ in range(piece.samples)] for piece in step.pieces]

    def _row(self, job: Job, piece: Piece, index: int) -> Row:
        draft, tokens = job.drafts[index], piece.request.tokens
        history = np.array(tokens, np.int32) if draft.params.penalised else np.empty(0, np.int32)
        return Row(draft.params, len(tokens), len(job.prompt_ids), history)

    def _choose(self, logits: Tensor, at: list[int], rows: list[Row], wanted: list[tuple[Job, int]]) -> list[Token]:
        if not rows:
            return []
        chosen = sample(logits if len(at) == len(logits) else logits[at], rows, self.info.eos_token_ids)
        errors, scores = chosen.errors(), dict(zip(chosen.logprob_rows, range(len(rows)), strict=False))
        out = []
        for r, ((job, index), token_id) in enumerate(zip(wanted, chosen.token_ids.tolist(), strict=True)):
            draft = job.drafts[index]
            if r in errors:
                draft.end("error", errors[r])
                out.append(Token(0, True))
                continue
            if r in scores and chosen.logprobs is not None:
                draft.scores.add(*_entry(chosen.logprobs, scores[r], draft.params.top_logprobs or 0))
            out.append(draft.push(token_id, self.info.eos_token_ids))
        return out

    def _score(self, job: Job, piece: Piece, logits: Tensor) -> None:
        """The row at position p tells of token p+1, of the prompt or of an item."""
        items, index = piece.request.ask.items, piece.request.index
        first, k = piece.cached_len + piece.emit[0] + 1, job.params.top_prompt_logprobs or 0
        ids, scores = job.prompt_ids, job.prompt_scores
        if items:
            ids, scores = (*ids, *items[index]), job.drafts[index].scores
        told = log_probs(logits, torch.tensor(ids[first : first + len(logits)]), k)
        for i in range(len(logits)):
            scores.add(*_entry(told, i, k))

    def _first_of_items(self, job: Job, logits: Tensor) -> None:
        """The prompt's last row tells of the first token of every item."""
        items = job.request.ask.items
        told = log_probs(logits.expand(len(items), -1), torch.tensor([item[0] for item in items]))
        for i, draft in enumerate(job.drafts):
            draft.scores.add(*_entry(told, i, 0))

    def _close(self, job: Job, reason: str) -> None:
        for draft in job.drafts:
            draft.end(reason)
        self.jobs.pop(job.request.arrival, None)

    def _checked(self, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        ids = token_ids(prompt_ids, self.info.vocab_size)
        if not ids:
            raise RuleError("a prompt has at least one token", "an empty prompt", "Start with some text")
        if len(ids) > self.context_length:
            raise RuleError(f"a prompt has at most {self.context_length} tokens", str(len(ids)), "Shorten it")
        return ids


def limits_of(config: EngineConfig) -> Limits:
    """What the options say about steps."""
    return Limits(config.chunked_prefill_size, config.max_running_requests, not config.disable_radix_cache)


def _entry(told: Logprobs, row: int, k: int) -> tuple[float, Top]:
    best = zip(told.top_ids[row, :k].tolist(), told.top[row, :k].tolist(), strict=True)
    return float(told.chosen[row]), tuple(best)
