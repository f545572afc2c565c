"""A recorded launch was looked up by its batch size alone.

Summary:
What a launch depends on besides memory is its key. The key was the number of requests and rows, as
it is in most engines.
Motivation:
Page tables of fixed width make it enough; tables that are rounded to powers of two do not.
Mechanism:
1. A step of four requests and 16 page entries is recorded.
2. The requests grow; the table now has 32 entries, and all arrays behind it lie elsewhere.
3. The launch of the 16 is replayed and reads page ids as positions.
Key functions:
`run.runner.Runner._recorded`: the key is the `Signature`, all that a launch depends on.
Symptom:
Right until a table outgrows its bucket, then garbage.
Risk and impact:
The class of keys that lack something (flashinfer#4014: the scale).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "class: a graph's key lacks what the launch depends on (compare sgl-project/sglang#24632)"
TARGET = "lockstep.run.runner:Runner._recorded"
CELLS = ("engine-replay/llama", "engine-replay/qwen3")
CRASH = True  # stale addresses may lie outside of the cache
RELATED = ("flashinfer-4014", "sglang-27664")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _recorded(self: Any, signature: Any, launch: Any) -> Any:
        for known, tape in self.tapes.items():
            shape = (known.bucket.requests, known.bucket.tokens, known.kind)
            if shape == (signature.bucket.requests, signature.bucket.tokens, signature.kind):
                return tape.replay()
        return old(self, signature, launch)

    return _recorded
