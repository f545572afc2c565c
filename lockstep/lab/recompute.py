"""The engine's oracle: each request's answer by the plainest means. The whole sequence is computed
alone, in one step that keeps nothing; for every token again, unless an engine answered right.

The engine must answer with these bits. The oracle runs the engine's own layers, so both may share
an error: `values` judges the numbers with the plain models.
"""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lockstep.lab import choice
from lockstep.lab.tiny import CONTEXT, Letters
from lockstep.llm.engine import Engine, Parts
from lockstep.llm.generation import Generation
from lockstep.llm.output import Top
from lockstep.run.kind import ENCODE, GENERATE, group_specs, kinds_of
from lockstep.run.runner import Share, StepDriver
from lockstep.sample.params import SamplingParams
from lockstep.sample.sampler import Logprobs, log_probs
from lockstep.types import GroupSpec, Layout

Floats = NDArray[np.float32]
Ids = tuple[int, ...]


@dataclass(frozen=True)
class StoryRequest:
    prompt: Ids
    params: SamplingParams
    at: int = 0  # the step at which it arrives
    abort: int | None = None  # the step before which it is aborted
    tenant: str = ""
    priority: int = 0
    score: bool = False  # wants log-probabilities of the prompt, no new token
    embed: bool = False  # wants its embedding, no new token
    items: tuple[Ids, ...] = ()  # wants log-probabilities of these after the prompt
    generated: tuple[float, ...] = ()  # as generated before: of its last tokens, or first item

    def add_to(self, engine: Engine) -> Generation:
        if self.items:
            return engine.add_items(self.prompt, self.items)
        return engine.add(
            self.prompt,
            self.params,
            embed=self.embed,
            scores_only=self.score,
            priority=self.priority,
            tenant=self.tenant,
        )


@dataclass(eq=False)
class Answer:
    """One completion: tokens, log-probabilities, best tokens per position, finish reason."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    best: list[Top] = field(default_factory=list)
    finish: str = "length"


class Recompute:
    """The answers of one model and backend; each completion is computed once and remembered. Keys
    are stored only with a `kv_dtype` that rounds them, in pages of one request."""

    def __init__(self, parts: Parts, kv_dtype: str = "") -> None:
        self.model, self.info, self.tokenizer = parts.model, parts.info, parts.tokenizer
        self.kv_dtype, self.ops = kv_dtype, parts.model.ops
        own = str(self.ops.dtype).removeprefix("torch.")  # the dtype that rounds nothing
        self.kinds = {
            name: replace(kind, specs=tuple(map(self._spec, kind.specs)))
            for name, kind in kinds_of(parts.model, kv_dtype=own).items()
        }
        self.encoder = self.kinds.get(ENCODE)
        # without `kv_dtype` only cross groups have pages: a decoder reads its source's rows
        specs = group_specs(self.kinds.values())
        pages = [0 if spec.layout is Layout.FRESH else CONTEXT for spec in specs]
        self.driver = StepDriver(self.kinds, pages, parts.backend)
        self._known: dict[tuple[Ids, SamplingParams], Answer] = {}
        self._scored: dict[tuple[Ids, Ids, int], tuple[Floats, list[Top]]] = {}

    def placed(self, prompt: Ids) -> tuple[Ids, Ids]:
        """Returns (the ids that the decoder begins with, the ids that the encoder reads)."""
        if self.encoder is None:
            return prompt, ()
        return (self.info.decoder_start_token_id or 0,), prompt

    def logits(self, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
        """Returns float32 [len(ids), vocabulary] of a sequence that is computed whole."""
        return self.model.logits(self.hidden(ids, source))

    def embedding(self, prompt: Sequence[int]) -> NDArray[np.float64]:
        """Returns [d]: the last row of a prompt, scaled to length 1."""
        row = self.hidden(prompt)[-1].double().cpu().numpy()
        unit: NDArray[np.float64] = row / np.sqrt((row * row).sum())
        return unit

    def hidden(self, ids: Sequence[int], source: Sequence[int] = ()) -> Tensor:
        """Returns float32 [len(ids), d]: the final hidden states."""
        request = self.driver.request()
        if self.encoder is not None:
            self.driver.step(self.encoder, [Share(request, source)])
        share = Share(request, ids, cross_len=len(source))
        rows = self.driver.step(self.kinds[GENERATE], [share]).rows
        request.close()
        return rows

    def _spec(self, spec: GroupSpec) -> GroupSpec:
        if self.kv_dtype and spec.layout is not Layout.FRESH:
            return replace(spec, kv_dtype=self.kv_dtype)
        if spec.layout in (Layout.FRESH, Layout.CROSS):
            return spec
        return replace(spec, layout=Layout.FRESH, kv_dtype="float32")  # nothing is stored

    def completions(self, order: StoryRequest, said: Sequence[Ids] = ()) -> list[Answer]:
        """Returns the answers; one forward suffices where an engine's tokens, `said`, are right."""
        if order.score or order.embed or order.items:
            return []
        answers, hints = [], [*said, *[()] * order.params.n]
        for params, hint in zip(order.params.completions(), hints, strict=False):
            key = (order.prompt, replace(params, prompt_logprobs=None, speculative=True))
            if key not in self._known:
                self._known[key] = self._generate(order.prompt, params, hint)
            answers.append(self._known[key])
        return answers

    def scores(self, ids: Ids, source: Ids = (), k: int = 0) -> tuple[Floats, list[Top]]:
        """Returns log-probabilities of ids[1:], computed whole, and the k best tokens of each."""
        if len(ids) == 1:
            return np.zeros(0, np.float32), []
        if (ids, source, k) not in self._scored:
            rows = self.logits(ids, source)[:-1]
            told = log_probs(self.ops, rows, torch.tensor(ids[1:]), k)
            best = [_pairs(told, row) for row in range(len(rows))]
            self._scored[ids, source, k] = told.chosen.cpu().numpy(), best
        return self._scored[ids, source, k]

    def text(
        self, prompt: Sequence[int], token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[str, bool]:
        """Returns a completion's text, cut before the first stop string, and whether there was one,
        by the standard library's incremental decoder. The text continues the prompt's: bytes at the
        prompt's end that are not yet a character belong to the completion."""
        ends = (i for i, token in enumerate(token_ids) if self._ends(token, params))
        said = token_ids[: next(ends, None)]
        early = max(0, params.min_tokens - 1)  # tokens whose text is not searched for stops
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # the decoder holds back the bytes of an incomplete character
        before = utf8.decode(Letters.spell(prompt))
        head = utf8.decode(Letters.spell(said[:early]))
        tail = utf8.decode(Letters.spell(said[early:]), final=True)
        places = ((tail.find(stop), stop) for stop in params.stop)
        found = sorted((at + len(stop), at) for at, stop in places if at >= 0)
        text = head + (tail[: found[0][1]] if found else tail)
        return text if before else text.removeprefix(" "), bool(found)

    def _ends(self, token: int, params: SamplingParams) -> bool:
        eos = token in self.info.eos_token_ids and not params.ignore_eos
        return eos or token in params.stop_token_ids

    def _generate(self, prompt: Ids, params: SamplingParams, said: Ids) -> Answer:
        begin, source = self.placed(prompt)
        out, k = Answer(), params.top_logprobs or 0
        most = CONTEXT - len(begin) if params.max_tokens is None else params.max_tokens
        said = said[: most - 1] if all(0 <= t < self.info.vocab_size for t in said) else ()
        known = self.logits((*begin, *said), source)[len(begin) - 1 :] if said else None
        while len(out.token_ids) < most:
            tokens, count = [*begin, *out.token_ids], len(out.token_ids)
            if known is not None and count < len(known) and tuple(out.token_ids) == said[:count]:
                row = known[count, None]
            else:
                row = self.logits(tokens, source)[-1:]
            logits, ends = row[0].float().cpu().numpy(), self.info.eos_token_ids
            token = choice.choose(logits, params, tokens, len(begin), ends)
            told = log_probs(self.ops, row, torch.tensor([token]), k)
            out.token_ids.append(token)
            out.logprobs.append(float(told.chosen[0]))
            out.best.append(_pairs(told, 0))
            stopped = params.stop and self.text(prompt, out.token_ids, params)[1]
            if stopped or self._ends(token, params):
                out.finish = "stop"
                break
        return out


def _pairs(told: Logprobs, row: int) -> Top:
    return tuple(zip(told.top_ids[row].tolist(), told.top[row].tolist(), strict=True))
