"""How many pages each group gets: arithmetic, printed as it is done.

A full group needs a slot per cached key; a window group, per running request, what its window still
sees plus what a step adds.
"""

import gc
import os
from collections.abc import Sequence

import torch

from lockstep.config import EngineConfig
from lockstep.kv.pool import all_bytes, check_fits, group_bytes, slot_bytes
from lockstep.kv.tables import peak_pages
from lockstep.order import stored_len
from lockstep.types import GroupSpec, Layout, RuleError

FRACTIONS = (0.3, 0.8)  # of the free memory, for the cache: of a machine's, of a GPU's


def size(
    specs: Sequence[GroupSpec],
    config: EngineConfig,
    context_length: int,
    device: torch.device | None = None,
) -> tuple[tuple[int, ...], str]:
    """The largest cache that the budget allows and that all running requests could fill: pages per
    group (0 for a fresh one), and the arithmetic as text."""
    gpu = device is not None and device.type == "cuda"
    if gpu:  # what an engine before has left goes first, though it was frozen
        gc.unfreeze()
        gc.collect()
    free, there = torch.cuda.mem_get_info(device) if gpu else (free_bytes(), all_bytes())
    fraction = config.mem_fraction_static or FRACTIONS[gpu]
    tokens = config.max_total_tokens or config.max_running_requests * context_length
    if config.max_total_tokens is None:
        budget = int(free * fraction)
        while tokens > 0 and total_bytes(specs, config, tokens) > budget:
            tokens = tokens * 15 // 16
        if tokens < specs[0].page_size:
            rule = "the cache holds at least one page"
            raise RuleError(rule, f"{budget:,} B of memory for it", "Raise mem_fraction_static")
    what = f"{tokens:,} tokens in pages of {specs[0].page_size:,}"
    check_fits(total_bytes(specs, config, tokens), what, there)
    pages = tuple(pages_of(spec, config, tokens) for spec in specs)
    stored = [(spec, n) for spec, n in zip(specs, pages, strict=True) if n] or [(specs[0], 0)]
    text = arithmetic([spec for spec, _ in stored], [n for _, n in stored])
    card = f", {fraction} of the GPU's free {free:,} B at most" if gpu else ""
    return pages, f"cache for {tokens:,} tokens{card}\n{text}"


def pages_of(spec: GroupSpec, config: EngineConfig, tokens: int) -> int:
    """Pages of one group, null page included, for `tokens` cached keys."""
    if spec.layout is Layout.FRESH:
        return 0
    step_len, requests = config.chunked_prefill_size, config.max_running_requests
    return peak_pages(spec, tokens, step_len, requests) + 1


def total_bytes(specs: Sequence[GroupSpec], config: EngineConfig, tokens: int) -> int:
    return sum(group_bytes(spec, pages_of(spec, config, tokens)) for spec in specs)


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


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
