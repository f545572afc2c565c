"""A completion that had ended went on sending its last words.

Summary:
Of several completions one ends early. Until the last one was done, its final piece of text was
streamed again with every step.
Motivation:
"Everything from here on" was a number of pieces, and -1 said that all had been told. As an index,
-1 is the last piece.
Mechanism:
1. A completion ends; text that was held back is its last piece, and is sent with the reason for the
   end.
2. The mark becomes -1.
3. A sibling needs another step. `pieces[-1:]` is not empty, so the piece and the end are sent once
   more.
Key functions:
`llm.generation.Generation.news`. A bug of Lockstep's own, found by the lab's engine cells.
Symptom:
A stream with n > 1 repeats the end of a short completion, with one finish_reason per repetition.
The answer in one piece is right.
Risk and impact:
Clients that concatenate get other text than those that do not stream. It takes text that was held
back until the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lockstep.llm.output import Chunk

SOURCE = "lockstep, found by the engine cells of the lab"
TARGET = "lockstep.llm.generation:Generation.news"
CELLS = ("engine-stream/llama", "engine-stream/qwen3")
RELATED = ("lockstep-stop-split", "lockstep-character-split")


def revert(old: Callable[..., Any]) -> Callable[..., Any]:
    def news(self: Any) -> Any:
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

    return news
