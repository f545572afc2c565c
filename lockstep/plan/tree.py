"""Trees are addresses, not masks: parents become, for every row, the list of nodes it sees.

A node is a draft token. Node i hangs below node parents[i] < i, or below the committed prefix (-1).
Its list is its path from the top, itself last: one node per position from the committed length on.
"""

from collections.abc import Sequence

from lockstep.types import RuleError


def paths(parents: Sequence[int], new_len: int) -> list[list[int]]:
    """The node lists of the last `new_len` nodes: this step's rows."""
    if not 0 < new_len <= len(parents):
        rule = "a tree step computes at least one and at most all nodes"
        raise RuleError(rule, f"{new_len} rows of {len(parents)} nodes", "Check new_len")
    lists: list[list[int]] = []
    for node, parent in enumerate(parents):
        if not -1 <= parent < node:
            rule = "a node's parent comes before it, or is -1"
            raise RuleError(rule, f"parents[{node}] = {parent}", "Order the nodes by depth")
        lists.append([*(lists[parent] if parent >= 0 else []), node])
    return lists[len(parents) - new_len :]
