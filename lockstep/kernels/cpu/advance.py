"""Moves a step with one row per request one position further, in its image: visible keys, write
slots and sampling counters. Called by the CPU backend in launches that draft a chain of tokens."""

from functools import cache
from typing import Any

from lockstep.kernels.cpu import threads
from lockstep.kernels.cpu.threads import ENTRIES, int32_at, int64_at
from lockstep.plan.address import first_seen, paged

COST_NS = 100


def unit(at: Any, nth: Any, worker: Any) -> None:
    """Advances one group. `start` is 0 if another group's call has already moved positions."""
    record = int64_at(at + ENTRIES)
    rows, page_size, window = record[0], record[1], record[2]
    positions, kv_lens, slots = int32_at(record[3]), int32_at(record[4]), int32_at(record[5])
    lo, hi, page_ids = int32_at(record[6]), int32_at(record[7]), int32_at(record[8])
    page_indptr, first_pos = int32_at(record[9]), int32_at(record[10])
    start, settings, stride = int32_at(record[11]), int64_at(record[12]), record[13]
    for i in range(rows):
        if record[11] != 0:
            positions[i] += 1
            start[i] += 1
            settings[i * stride] += 1
        kv_lens[i] = hi[i] = positions[i] + 1
        lo[i] = first_seen(hi[i], window)
        slots[i] = paged(page_ids, page_indptr, first_pos, page_size, i, positions[i])


@cache
def compiled() -> Any:
    """Returns the kernel, compiled once per process."""
    names = threads.linked(globals(), {}, ("first_seen", "paged"))
    return threads.kernel("advancing", names["unit"])
