"""Where a key is stored, and where a row's window begins: the only such formulas of the code base.

Write slots, read addresses, moves and windows all use these functions, and the CPU kernels compile
them. A slot is one token's place in a pool. Arguments are scalars or integer arrays."""

from typing import Any


def paged(ids: Any, page_indptr: Any, first_pos: Any, size: Any, request: Any, p: Any) -> Any:
    """Returns the slot of position `p` through `request`'s page table; first_pos[request] <= p."""
    page = ids[page_indptr[request] + (p - first_pos[request]) // size]
    return page * size + p % size


def listed(tail_slots: Any, tail_indptr: Any, start: Any, row: Any, p: Any) -> Any:
    """Returns the slot of position `p` in `row`'s slot list; start[row] <= p <= row's position."""
    return tail_slots[tail_indptr[row] + p - start[row]]


def first_seen(hi: Any, window: Any) -> Any:
    """Returns the first position that a row sees if it sees the last `window` ones below `hi`."""
    return (hi - window) * (hi > window)
