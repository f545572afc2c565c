"""A recorded launch was looked up by its batch size alone.

Summary:
A recording's key must contain everything but memory contents that the launch depends on. The key
was the number of requests and rows, as in most engines.
Motivation:
With page tables of fixed width that is enough; with tables rounded up to powers of two it is not.
Mechanism:
1. A step of four requests and 16 page entries is recorded.
2. The requests grow. The table now has 32 entries, and all arrays after it are at other offsets.
3. The launch for 16 entries is replayed and reads page ids as positions.
Key functions:
`run.runner.Runner._replay_or_record`: the key is the `Signature`, which covers all that a
launch depends on.
Symptom:
Right until a table outgrows its bucket, then garbage.
Risk and impact:
One of a class: keys that lack something (flashinfer#4014: the scale).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a graph's key lacks what the launch depends on (compare sgl-project/sglang#24632)"
TARGET = "lockstep.run.runner:Runner._replay_or_record"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
CRASH = True  # stale addresses may be outside the cache
RELATED = ("flashinfer-4014", "sglang-27664")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _replay_or_record(self: Any, signature: Any, launch: Any) -> Any:
        for known, tape in self.tapes.items():
            shape = (known.bucket.requests, known.bucket.tokens, known.kind)
            if shape == (signature.bucket.requests, signature.bucket.tokens, signature.kind):
                return tape.replay()
        return old(self, signature, launch)

    return _replay_or_record
