"""The canonical order of every reduction: constants of the engine, never arguments.

Nothing here may depend on the batch, the chunk, the page size or the number of processors. `docs/numerics.md` states the order in
words; kernels take these numbers as they are. Knows head sizes and nothing else; every backend and the lab read it.
"""

from __future__ import annotations

LANES = 16  # a tile's row sum: lane j adds keys j, j+16, ... ascending; then lanes fold 8+8, 4+4, 2+2, 1+1
HEAD_MULTIPLE = 8  # head sizes are stored as multiples of this, with columns of zeros behind their own
LOG2E = 1.4426950408889634
LN2 = 0.6931471805599453


def stored_len(d: int) -> int:
    """Columns that a head of `d` columns takes up in the cache and in kernels; those behind d are 0 and change no sum."""
    return -(-d // HEAD_MULTIPLE) * HEAD_MULTIPLE


def tile_len(d_qk: int, d_v: int) -> int:
    """Keys per tile. Tiles are aligned to absolute position 0."""
    return 64 if stored_len(max(d_qk, d_v)) <= 256 else 32


def split_len(d_qk: int, d_v: int) -> int:
    """Keys per split: online softmax inside, one fold between. Aligned to absolute position 0; a multiple of the tile."""
    return 512
