"""A prefix could be matched before the step that computes it had run.

Summary:
Blocks of a prompt were entered into the prefix cache with their hashes when the request was
scheduled, before their keys were written.
Motivation:
The tokens are known at that moment, and a second request with the same prompt may arrive soon.
Mechanism:
1. A long prompt is admitted; all its blocks become matchable immediately.
2. The first step computes one chunk of it; then the request is aborted or preempted.
3. A second request with the same prompt matches blocks of the chunks that were never computed.
4. It attends to pages that were never written.
Key functions:
Hashing of full blocks in vLLM's KV cache manager, where a hit in the same step sufficed. Here
`sched.scheduler.Scheduler._admit`; blocks are inserted by `_store`, after the step that wrote them.
Within one step it would do no harm here: all rows write before any attends.
Symptom:
The second answer depends on the previous contents of the page. Unwritten pages are NaN in the lab.
Risk and impact:
Another user's text is read, with long prompts and under load. Where both requests run, `plan.check`
refuses a page that one request writes while another holds it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

SOURCE = "vllm-project/vllm#41838"
TARGET = "lockstep.sched.scheduler:Scheduler._admit"
CELLS = ("engine-abort/llama", "engine-abort/qwen3")
RELATED = ("sglang-29860", "trtllm-12306")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def _admit(self: Any, request: Any) -> Any:
        admitted = old(self, request)
        if (
            admitted
            and request.node is not None
            and self.tree.make_room(request.table.needs(len(request.tokens)))
        ):
            tokens, table = request.tokens, request.table
            table.reserve(len(tokens))
            request.node = self.tree.insert(request.node, tokens, table, len(tokens))
        return admitted

    return _admit
