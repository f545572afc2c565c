"""Which of the drafted tokens are right: the target's own sample behind every node says it.

From the root on, a path goes on for as long as one of the node's children is the token that was
sampled behind it: what is accepted is what plain decoding would have sampled one by one. Knows
numbers on the host alone; `llm.accept` calls it when a step has come back.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NodeRows(NamedTuple):
    """A draft as it was launched: rows `first`, `first` + 1, ... of those that were sampled. The
    first is of the request's last token."""

    first: int
    token_ids: Sequence[int]
    parents: Sequence[int]


class Verified(NamedTuple):
    """What every completion of a step gets."""

    token_ids: list[tuple[int, ...]]  # the samples along its path
    nodes: dict[int, tuple[int, ...]]  # the path, where there was a draft: as many as tokens
    errors: dict[int, str]  # why the next token could not be sampled, where that is so
    rows: list[tuple[int, ...]]  # the sampled rows that the tokens come from


def verify(
    firsts: Sequence[int],
    drafts: Mapping[int, NodeRows],
    sampled: Sequence[int],
    errors: Mapping[int, str],
) -> Verified:
    """`firsts[c]` is the first sampled row of completion c, its only one without a draft; `sampled`
    and `errors` are by row."""
    out = Verified([], {}, {}, [])
    for completion, first in enumerate(firsts):
        draft = drafts.get(completion)
        nodes = (0,) if draft is None else accepted_path(draft, sampled)
        if (last := first + nodes[-1]) in errors:
            out.errors[completion] = errors[last]
            nodes = nodes[:-1]
        if draft is not None:
            out.nodes[completion] = nodes
        rows = tuple([first + node for node in nodes])
        out.rows.append(rows)
        out.token_ids.append(tuple([sampled[row] for row in rows]))
    return out


def accepted_path(draft: NodeRows, sampled: Sequence[int]) -> tuple[int, ...]:
    """The nodes from the root on whose tokens were sampled behind their parents: these come first,
    and siblings differ."""
    path, sample = [0], sampled[draft.first]
    for node, parent in enumerate(draft.parents):
        if parent == path[-1] and draft.token_ids[node] == sample:
            path.append(node)
            sample = sampled[draft.first + node]
    return tuple(path)
