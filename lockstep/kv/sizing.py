"""What a cache costs: one formula for the bytes of a group, and the arithmetic as text.

Host only. The pool allocates exactly these shapes, padding included.
"""

import os
from collections.abc import Sequence

from lockstep.order import stored_len
from lockstep.types import KV_FORMATS, GroupSpec, Layout, RuleError


def storage_shapes(spec: GroupSpec, num_pages: int) -> tuple[tuple[int, int, int], ...]:
    """[slots, kv_heads, columns as stored] of one layer's K and V, of its latent rows, or none."""
    slots = num_pages * spec.page_size
    if spec.layout is Layout.FRESH:
        return ()
    k, v = ((slots, spec.kv_heads, stored_len(d)) for d in (spec.d_qk, spec.d_v))
    return (k,) if spec.layout is Layout.LATENT else (k, v)


def slot_bytes(spec: GroupSpec) -> int:
    """Bytes of one token in one layer of the group."""
    numbers = sum(heads * d for _, heads, d in storage_shapes(spec, 1))
    return numbers * KV_FORMATS[spec.kv_dtype].nbytes


def group_bytes(spec: GroupSpec, num_pages: int) -> int:
    """Bytes of the group's pool, all layers, null page included."""
    return num_pages * spec.page_size * slot_bytes(spec) * len(spec.layers)


def all_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check_fits(needed_bytes: int, what: str, there: int | None = None) -> None:
    """Raises unless all memory of a device, or of this machine, could hold so many bytes."""
    there = all_bytes() if there is None else there
    if needed_bytes > there:
        rule = f"the cache fits into the {there:,} B of this machine's memory"
        got = f"{needed_bytes:,} B for {what}"
        raise RuleError(rule, got, "Lower max_total_tokens or page_size")


def padding(spec: GroupSpec) -> str:
    """Which head sizes are stored wider than they are, in words; "" if none is."""
    sizes = dict.fromkeys((spec.d_qk,) if spec.layout is Layout.LATENT else (spec.d_qk, spec.d_v))
    wider = [f"{d} stored as {stored_len(d)}" for d in sizes if stored_len(d) != d]
    return f", heads of {' and '.join(wider)}" if wider else ""


def arithmetic(specs: Sequence[GroupSpec], num_pages: Sequence[int]) -> str:
    """The memory of a cache, one line per group and a sum, as it is printed at start."""
    lines, total = [], 0
    for spec, pages in zip(specs, num_pages, strict=True):
        window = f" window {spec.window}" if spec.window else ""
        slots = f"{pages} pages x {spec.page_size} slots x {slot_bytes(spec)} B"
        nbytes = group_bytes(spec, pages)
        name = f"{spec.layout}{window} {spec.kv_dtype}{padding(spec)}"
        lines.append(f"{name}: {slots} x {len(spec.layers)} layers = {nbytes:,} B")
        total += nbytes
    return "\n".join([*lines, f"total {total:,} B"])
