"""Where a key lives, and from where on a row sees keys: the one such formula of the code base.

Write slots, read addresses, moves, windows and the CPU kernels all come from these lines; the
kernels compile this very text. A slot is one token's place in a pool. Scalars or integer arrays.
"""

from typing import Any


def paged(
    page_ids: Any, page_indptr: Any, first_pos: Any, page_size: Any, request: Any, p: Any
) -> Any:
    """Slot of position `p` of `request`, taken from its pages. `first_pos[request] <= p`."""
    return (
        page_ids[page_indptr[request] + (p - first_pos[request]) // page_size] * page_size
        + p % page_size
    )


def listed(tail_slots: Any, tail_indptr: Any, start: Any, row: Any, p: Any) -> Any:
    """Slot of position `p` as `row` names it. `start[row] <= p <= position of row`."""
    return tail_slots[tail_indptr[row] + p - start[row]]


def first_seen(hi: Any, window: Any) -> Any:
    """The first position that a row sees, of those below `hi`: that of its last `window` keys."""
    return (hi - window) * (hi > window)
