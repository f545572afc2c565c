"""The rules of the queue, as small pure functions: who is next, who steps back, how many rows fit.

A rank never changes: a request is overtaken only by as many later ones as the head start allows,
the best-ranked one always makes progress, and nobody preempts in circles. No result depends on it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.sched.request import Request

HEAD_START = 64  # later arrivals that one level of priority lets a request overtake


def rank(request: Request) -> tuple[int, int, int]:
    """The order of all requests; lower is better. Completions of one request stand together."""
    return request.arrival - HEAD_START * request.spec.priority, request.arrival, request.index


def waits(held_until: Any, settled: int) -> Any:
    """Whether a step behind number `settled` has to be settled first. Of an int or an array."""
    return held_until > settled


def victim(
    running: Sequence[Request], instead_of: Request, placed: Collection[Request]
) -> Request | None:
    """Who gives its pages to `instead_of`: the worst-ranked one not placed yet, if it is worse."""
    worse = [r for r in running if r not in placed and rank(r) > rank(instead_of)]
    return max(worse, key=rank, default=None)


def displaced(running: Sequence[Request], head: Request) -> Request | None:
    """Who makes way for a waiting request: only somebody of lower priority, and worse-ranked."""
    return victim([r for r in running if r.spec.priority < head.spec.priority], head, ())


def rows(request: Request, tokens: int, emits: int) -> int:
    """How many of its missing rows a request may compute in a step with so much room."""
    new_len = min(request.missing_len, tokens)
    if new_len + request.spec.continuations <= emits:
        return new_len  # as many as it could ever emit
    while new_len > 0 and (over := request.emits(new_len) - emits) > 0:
        new_len -= 1 if request.samples(new_len) else over
    return max(0, new_len)
