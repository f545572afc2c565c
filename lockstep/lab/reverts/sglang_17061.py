"""The second gap in a window was missed, and evicted keys were reused.

Summary:
A prefix tree for window models may lose the window keys of inner nodes. A match must find a whole
window before its end; the counter that measures it was not reset at every gap.
Motivation:
Window keys that are older than the window are evicted first; the nodes stay, as tombstones, for the
full layers.
Mechanism:
1. The match walks down the path and counts the length since the last gap.
2. At a gap the counter was reset only if the window had been whole just before.
3. A second gap soon after the first is therefore missed.
4. The match ends where part of the window is missing; its pages contain whatever the slots hold
   now.
Key functions:
The prefix match of SGLang's radix cache for window models. Here `kv.prefix.Prefix._longest`.
Symptom:
After evictions, a cache hit gives a different answer from a miss. It needs two gaps closer together
than a window.
Risk and impact:
Wrong text under memory pressure only, without an error: the table has fewer pages than the plan
assumes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lockstep.kv.tables import keep_from

SOURCE = "sgl-project/sglang#17061"
TARGET = "lockstep.kv.prefix:Prefix._longest"
CELLS = ("engine-evict/qwen3", "engine-evict/gpt-oss")
RELATED = ("trtllm-10875", "sglang-29350", "sglang-16507")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _longest(self: Any, top: Any, ahead: int, ids: Sequence[int], last: int) -> Any:
        best = node = top
        since = {g: 0 for g in self._groups_of(top) if self.specs[g].window is not None}
        while node.end + self.unit <= last:
            child = node.children.get(tuple(ids[node.end : node.end + self.unit + ahead]))
            if child is None:
                break
            for g in since:
                begin = child.end - len(child.pages[g]) * self.specs[g].page_size
                whole = since[g] <= keep_from(self.specs[g], node.end)
                if begin > child.end - self.unit and whole:
                    since[g] = begin
            node = child
            if all(since[g] <= keep_from(self.specs[g], node.end) for g in since):
                best = node
        return best

    return _longest
