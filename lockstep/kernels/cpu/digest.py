"""A digest of bytes at memory speed: it identifies weights, but does not protect against forgery.

Bytes are divided into blocks, a block into lanes of 64-bit words. A lane absorbs each word in a
step that is invertible in the word and in the lane, so a single changed word always changes it. The
lanes' final values are hashed by BLAKE2b. Called where weights are read.
"""

import hashlib
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.threads import int64_at

LANES = 64  # independent chains of 64-bit words
BLOCK = 1 << 9  # rows of LANES words in a block: 256 KiB
FACTOR = -7046029254386353131  # odd; 2^64 divided by the golden ratio, as int64
SIZE = 16  # bytes of a digest
BLOCK_NS = 40_000  # per block on one thread


def digest(tensor: Tensor) -> bytes:
    """Returns the digest of a CPU tensor's bytes."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    rows = len(data) // (8 * LANES)
    blocks = -(-rows // BLOCK)
    lanes = np.zeros(max(1, blocks) * LANES, np.int64)
    entries, cost_ns = (data.data_ptr(), rows, lanes.ctypes.data), blocks * BLOCK_NS
    threads.Call(work(), entries, blocks, threads.team(blocks, cost_ns), cost_ns).run()
    rest = data[rows * 8 * LANES :].numpy().tobytes()
    ends = lanes.tobytes() + rest + len(data).to_bytes(8, "little")
    return hashlib.blake2b(ends, digest_size=SIZE).digest()


@threads.njit(**threads.OPTIONS)
def unit(at: Any, block: Any, worker: Any) -> None:
    """Absorbs one block into its lanes. The entries are `digest`'s."""
    record = int64_at(at + threads.ENTRIES)
    lanes, rows = int64_at(record[2] + 8 * LANES * block), record[1]
    for row in range(block * BLOCK, min((block + 1) * BLOCK, rows)):
        words = int64_at(record[0] + 8 * LANES * row)
        for j in range(LANES):
            mixed = (lanes[j] ^ words[j]) * FACTOR
            lanes[j] = mixed ^ ((mixed >> 32) & 0xFFFFFFFF)


work = cache(partial(threads.kernel, "digest", unit))  # compiled once per process
