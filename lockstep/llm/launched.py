"""A step on its way: what it brings, and for whom, until it is settled.

On a GPU everything is copied to the host when the step is launched, and one wait, when it is
settled, is for all of it. Knows what the engine asked for, not how it is computed; the engine makes
and settles these.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lockstep.llm.generation import ScoreUpdate
from lockstep.llm.rows import SampledRows
from lockstep.sample.sampler import Logprobs, Sampled
from lockstep.sched.request import ScheduledStep


@dataclass(frozen=True, eq=False)
class Launched:
    """What a step brings is on the device. `chosen` has an entry for every sampled row, number
    `begins` of whose completion's tokens it is."""

    step: ScheduledStep
    rows: SampledRows
    begins: tuple[int, ...] = ()
    chosen: Sampled | None = None
    scored: tuple[ScoreUpdate, ...] = ()
    embeddings: Tensor | None = None
    hidden: tuple[Tensor, ...] = ()  # of all rows, behind the layers that a draft reads
    ready: torch.Event | None = None  # when all of it lies on the host

    def first_ids(self, chosen: Sampled) -> Tensor:
        """The first token of every completion: what rows of the next step may wait for."""
        return chosen.token_ids[list(self.rows.firsts)] if self.rows.drafts else chosen.token_ids

    def fetched(self) -> Launched:
        """The same, on its way to the host; nothing waits for it here."""
        embeddings = None if self.embeddings is None else on_host(self.embeddings)
        scored = [s._replace(logprobs=Logprobs(*map(on_host, s.logprobs))) for s in self.scored]
        chosen = self.chosen
        if chosen is not None:
            logprobs = chosen.logprobs and Logprobs(*map(on_host, chosen.logprobs))
            ids, states = on_host(chosen.token_ids), on_host(chosen.states)
            chosen = replace(chosen, token_ids=ids, states=states, logprobs=logprobs)
        ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        ready.record()
        out = replace(self, chosen=chosen, scored=tuple(scored), embeddings=embeddings)
        return replace(out, ready=ready)


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, on its way there."""
    there = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return there.copy_(tensor, non_blocking=True)
