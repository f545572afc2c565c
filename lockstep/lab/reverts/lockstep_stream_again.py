"""A finished completion kept sending its last piece of text.

Summary:
One of several completions ends early. Its final piece of text was streamed again with every step
until the last completion ended.
Motivation:
"Everything from here on" was an index into the pieces, and -1 meant that all had been sent. As an
index, -1 is the last piece.
Mechanism:
1. A completion ends. Text that was held back becomes its last piece and is sent with the finish
   reason.
2. The index becomes -1.
3. A sibling needs another step. `pieces[-1:]` is not empty, so the piece and the finish reason are
   sent once more.
Key functions:
`llm.generation.Generation.new_chunks`. A bug of Lockstep's own, found by the lab's engine cells.
Symptom:
A stream with n > 1 repeats the end of a short completion, with one finish_reason per repetition.
The unary answer is right.
Risk and impact:
Clients that concatenate the pieces get a different text from those that do not stream. It needs
text that was held back until the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.llm.output import Chunk

SOURCE = "lockstep, found by the engine cells of the lab"
TARGET = "lockstep.llm.generation:Generation.new_chunks"
CELLS = ("engine-stream/llama", "engine-stream/qwen3")
RELATED = ("lockstep-stop-split", "lockstep-character-split")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def new_chunks(self: Any) -> Any:
        self.publish()
        out = []
        for i, draft in enumerate(self.completions):
            pieces, ids = self._sent[i]
            text, new = "".join(draft.pieces[pieces:]), tuple(draft.token_ids[ids:])
            if text or new or (draft.finish is not None and pieces >= 0):
                out.append(Chunk(draft.params.sample_index, text, new, draft.finish))
                self._sent[i] = (
                    len(draft.pieces) if draft.finish is None else -1,
                    len(draft.token_ids),
                )
        return out

    return new_chunks
