"""Verifies drafts: the target's own sample after every node decides which draft tokens are right.

From the root, a path continues while one of the node's children is the token that was sampled after
the node: what is accepted is what plain decoding would have sampled one by one. Knows only numbers
on the host; `llm.accept` calls it when a step is back on the host.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NodeRows(NamedTuple):
    """A draft as it was launched: rows `first`, `first` + 1, ... of the sampled rows. The first is
    that of the request's last token."""

    first: int
    token_ids: Sequence[int]
    parents: Sequence[int]


class Verified(NamedTuple):
    """By completion: the accepted path, if there was a draft; the samples along it; and the reason
    if the next token could not be sampled."""

    nodes: dict[int, tuple[int, ...]]
    token_ids: dict[int, tuple[int, ...]]
    errors: dict[int, str]


def verify(
    firsts: Sequence[int],
    drafts: Mapping[int, NodeRows],
    sampled: Sequence[int],
    errors: Mapping[int, str],
) -> Verified:
    """Returns what each draft's samples accept. `firsts[c]` is completion c's first sampled row,
    its only one without a draft; `sampled` and `errors` are by row."""
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
    """Returns the nodes accepted from the root on. Parents precede children, siblings differ."""
    path, sample = [0], sampled[draft.first]
    for node, parent in enumerate(draft.parents):
        if parent == path[-1] and draft.token_ids[node] == sample:
            path.append(node)
            sample = sampled[draft.first + node]
    return tuple(path)
