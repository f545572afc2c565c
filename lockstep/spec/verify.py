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
    """By completion: the accepted path, where there was a draft, and the samples along it; and why
    the next token could not be sampled, where that is so."""

    nodes: dict[int, tuple[int, ...]]
    token_ids: dict[int, tuple[int, ...]]
    errors: dict[int, str]


def verify(
    firsts: Sequence[int],
    drafts: Mapping[int, NodeRows],
    sampled: Sequence[int],
    errors: Mapping[int, str],
) -> Verified:
    """`firsts[c]` is the first sampled row of completion c, its only one without a draft; `sampled`
    and `errors` are by row."""
    alone = [(c, first) for c, first in enumerate(firsts) if first in errors and c not in drafts]
    out = Verified({}, {}, {c: errors[first] for c, first in alone})
    for completion, draft in drafts.items():
        nodes = accepted_path(draft, sampled)
        if (last := draft.first + nodes[-1]) in errors:
            out.errors[completion] = errors[last]
            nodes = nodes[:-1]
        out.nodes[completion] = nodes
        out.token_ids[completion] = tuple([sampled[draft.first + node] for node in nodes])
    return out


def accepted_path(draft: NodeRows, sampled: Sequence[int]) -> tuple[int, ...]:
    """Nodes from the root on, each sampled behind its parent: these come first, siblings differ."""
    path, sample = [0], sampled[draft.first]
    for node, parent in enumerate(draft.parents):
        if parent == path[-1] and draft.token_ids[node] == sample:
            path.append(node)
            sample = sampled[draft.first + node]
    return tuple(path)
