"""The answer to a request by the plainest means: for every token the whole sequence again, alone,
in one step that keeps nothing.

No page, no plan of a cache, no scheduler, no tree, no batch, no chunk; the token is chosen by
`choice`. What the engine answers must have these bits. It runs the engine's own layers, so both may
be wrong alike: its values are judged by `values`, with the plain models.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kv.pages import PagePool
from lockstep.kv.tables import Table
from lockstep.lab import choice
from lockstep.lab.tiny import CONTEXT, Letters
from lockstep.llm.engine import Parts
from lockstep.llm.output import Top
from lockstep.plan.build import Work, build
from lockstep.plan.step import StepPlan
from lockstep.run.kind import ENCODE, GENERATE, StepKind, group_specs, kinds_of
from lockstep.run.runner import Runner
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import log_probs
from lockstep.types import GroupSpec, Layout

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Order:
    """One request of a story. `at` and `abort` count steps: when it arrives, and before which step
    it is aborted."""

    prompt: tuple[int, ...]
    params: SamplingParams
    at: int = 0
    abort: int | None = None
    tenant: str = ""
    priority: int = 0
    score: bool = False  # log-probabilities of the prompt, no new token


@dataclass(eq=False)
class Answer:
    """One completion: tokens, their log-probabilities, the best tokens beside each, and why it
    ended."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[Top] = field(default_factory=list)
    finish: str = "length"


class Recompute:
    """Answers for one model and backend; each completion is computed once and remembered.

    Keys are not kept. With a `kv_dtype` they are, in pages of one request, because what is computed
    from them is computed from what the cache makes of them.
    """

    def __init__(self, parts: Parts, kv_dtype: str = "float32") -> None:
        self.model, self.info, self.tokenizer = parts.model, parts.info, parts.tokenizer
        self.kv_dtype, self.kept = kv_dtype, kv_dtype != "float32"
        self.kinds = {
            name: replace(kind, specs=tuple(self._spec(s, kv_dtype) for s in kind.specs))
            for name, kind in kinds_of(parts.model, parts.info).items()
        }
        self.encoder = self.kinds.get(ENCODE)
        self.specs = group_specs(self.kinds.values())
        pages = [
            0 if s.layout is Layout.FRESH else CONTEXT for s in self.specs
        ]  # plainly, a source's alone: a decoder reads its rows
        self.pages = [PagePool(n) if n else None for n in pages]
        self.runner = Runner(self.specs, pages, parts.backend, self.model.ops)
        self._known: dict[tuple[tuple[int, ...], SamplingParams], Answer] = {}

    def placed(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """(what a decoder begins with, what its encoder reads)."""
        return (
            ((self.info.decoder_start_token_id or 0,), prompt)
            if self.encoder is not None
            else (prompt, ())
        )

    def logits(self, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
        """float32 [len(ids), vocabulary]: of every row of a sequence that is computed whole, its
        source encoded before."""
        return self.model.logits(self.hidden(ids, source))

    def embedding(self, prompt: Sequence[int]) -> NDArray[np.float64]:
        """[d]: the last row of a prompt, of length 1."""
        row = self.hidden(prompt)[-1].double().numpy()
        unit: NDArray[np.float64] = row / np.sqrt((row * row).sum())
        return unit

    def hidden(self, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
        """float32 [len(ids), d]: the rows that logits are made of."""
        table = Table(self.specs, self.pages)
        table.reserve(len(ids) if self.kept else 0, cross_len=len(source))
        if self.encoder is not None:
            plan = self._plan(table, self.encoder, len(source), len(source), len(source))
            self.runner.run(plan, torch.tensor(source), self.encoder)
        kind = self.kinds[GENERATE]
        plan = self._plan(table, kind, len(ids), len(source))
        rows = self.runner.run(plan, torch.tensor(ids), kind).rows
        table.close()
        return rows

    def _spec(self, spec: GroupSpec, kv_dtype: str) -> GroupSpec:
        """A group as this oracle has it."""
        if spec.layout is Layout.FRESH:
            return spec
        if self.kept:
            return replace(spec, kv_dtype=kv_dtype)
        return spec if spec.layout is Layout.CROSS else replace(spec, layout=Layout.FRESH)

    def _plan(
        self, table: Table, kind: StepKind, rows: int, cross_len: int, cross_new: int = 0
    ) -> StepPlan:
        work = Work(
            0,
            rows,
            tuple(table.pages(g) for g in kind.groups),
            (rows - 1,),
            None,
            cross_len,
            cross_new,
        )
        return build(kind.specs, [work])

    def completions(self, order: Order) -> list[Answer]:
        """What a request comes to, one answer per completion."""
        return (
            []
            if order.score
            else [self._completion(order.prompt, each) for each in order.params.completions()]
        )

    def prompt_scores(self, prompt: Sequence[int], k: int) -> tuple[Floats, list[Top]]:
        """Log-probabilities of a prompt, NaN for its first token, and the k best tokens at each
        place."""
        if len(prompt) == 1:
            return np.array([np.nan], np.float32), [()]
        told = log_probs(self.model.ops, self.logits(prompt)[:-1], torch.tensor(prompt[1:]), k)
        best: list[Top] = [
            tuple(zip(a.tolist(), b.tolist(), strict=True))
            for a, b in zip(told.top_ids, told.top, strict=True)
        ]
        return np.concatenate((np.array([np.nan], np.float32), told.chosen.numpy())), [(), *best]

    def text(
        self, prompt: Sequence[int], token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[str, bool]:
        """The text of a completion, cut before the first stop string, and whether there was one: by
        looking at the whole.

        It goes on where the prompt's text ends; bytes there that are no character yet belong to the
        completion. Straight from the alphabet's bytes, by the library's own incremental decoder: no
        tokenizer and no window of tokens.
        """
        ends = [
            i
            for i, t in enumerate(token_ids)
            if t in params.stop_ids or (t in self.info.eos_token_ids and not params.ignore_eos)
        ]
        said = token_ids[: ends[0]] if ends else token_ids
        early = max(0, params.min_tokens - 1)  # tokens whose text is not searched
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        before = utf8.decode(
            Letters.spell(prompt)
        )  # the decoder keeps the bytes of a character that is not complete
        head = utf8.decode(Letters.spell(said[:early]))
        tail = utf8.decode(Letters.spell(said[early:]), final=True)
        found = sorted(
            (at + len(stop), at) for stop in params.stops if (at := tail.find(stop)) >= 0
        )
        text = head + (tail[: found[0][1]] if found else tail)
        return text if before else text.removeprefix(" "), bool(found)

    def _completion(self, prompt: tuple[int, ...], params: SamplingParams) -> Answer:
        key = (prompt, replace(params, prompt_logprobs=None))
        if key not in self._known:
            self._known[key] = self._generate(prompt, params)
        return self._known[key]

    def _generate(self, prompt: tuple[int, ...], params: SamplingParams) -> Answer:
        begin, source = self.placed(prompt)
        tokens, out, k = list(begin), Answer(), params.top_logprobs or 0
        most = CONTEXT - len(begin) if params.max_tokens is None else params.max_tokens
        while len(out.token_ids) < most:
            row = self.logits(tokens, source)[-1:]
            token = choice.choose(
                row[0].numpy(), params, tokens, len(begin), self.info.eos_token_ids
            )
            told = log_probs(self.model.ops, row, torch.tensor([token]), k)
            out.token_ids.append(token)
            out.logprobs.append(float(told.chosen[0]))
            out.best.append(tuple(zip(told.top_ids[0].tolist(), told.top[0].tolist(), strict=True)))
            tokens.append(token)
            ended = token in params.stop_ids or (
                token in self.info.eos_token_ids and not params.ignore_eos
            )
            if ended or (params.stops and self.text(prompt, out.token_ids, params)[1]):
                out.finish = "stop"
                break
        return out
