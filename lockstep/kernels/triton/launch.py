"""Launches attention: which launch shape serves which requests, by lengths and head sizes, and a
kernel's arguments by name. A shape changes speed, never bits; the figures behind the choice are in
`docs/performance.md`. Knows tensors and what rows see, and no plan."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.triton.items import Flags, Longs, Rows
from lockstep.order import AttentionOrder, stored_len
from lockstep.plan.build import power
from lockstep.types import INT32_MAX, GroupSpec, Layout, RuleError

FEW = 16  # rows (token, head) of a request that still make one small block
PROGRAMS = 264  # two per multiprocessor: fewer whole blocks than this are split over programs
WHOLE = 1.05  # times a multiprocessor's share of all keys: a request up to this is not split
TOKENS = 96  # rows of a request from which a block of 128 tokens is worth while
PREFILL_ITEMS = 100  # of those, fewer are left to the plain kernel

Arguments = dict[str, Any]  # of kernels, by name


@dataclass(frozen=True)
class Tuning:
    """The launch shape of one kernel variant."""

    rows: int  # flat rows (token, head) per block
    warps: int
    stages: int  # tiles in flight; the warp-specialised kernels count those of head size 128
    parts: bool  # a program per split, folded by the last to arrive
    fold_rows: int = 4
    registers: int | None = None  # at most so many per thread
    # "plain" (attend.py), or a warp-specialised twin: "prefill" (blocks of 128 tokens of one head),
    # "decode" (16 rows), "latent" (64 rows)
    kernel: str = "plain"


def few(spec: GroupSpec, tree: bool = False) -> Tuning:
    """One small block per request and kv head, a program per split. A tree's second loop needs
    twice the registers."""
    if narrow(spec):
        return some(spec, tree)
    warps = 8 if tree else 4
    if spec.d_v > 256:
        return Tuning(rows=16, warps=warps, stages=2, parts=True, fold_rows=1)
    if spec.d_v > 128:
        return Tuning(rows=16, warps=warps, stages=4, parts=True, fold_rows=2)
    return Tuning(rows=16, warps=warps, stages=4, parts=True)


def some(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Blocks of 64 rows, a program per split."""
    if tree and spec.d_v > 128 and not narrow(spec):
        return few(spec, tree)
    if spec.d_v > 256:
        return Tuning(rows=64, warps=8, stages=1 if narrow(spec) else 2, parts=True, fold_rows=1)
    warps = 4 if max(spec.d_qk, spec.d_v) < 128 and not tree else 8
    return Tuning(rows=64, warps=warps, stages=2, parts=True, fold_rows=2)


def many(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Whole blocks, folded as they go; a tree is always parts."""
    if tree or (spec.d_v > 256 and narrow(spec)):
        return some(spec, tree)
    if spec.d_v > 256:
        return Tuning(rows=32, warps=8, stages=1, parts=False)
    if spec.d_v > 128:
        return Tuning(rows=64, warps=4, stages=2, parts=False)
    if any(attn.soft_cap is not None for attn in spec.layers):  # tanh needs registers too
        return Tuning(rows=64, warps=8, stages=2, parts=False)
    return Tuning(rows=128, warps=8, stages=3, parts=False)


def narrow(spec: GroupSpec) -> bool:
    """Keys of one byte: blocks under 64 rows would use mma.sync, whose operands, widened in
    registers, are regrouped along K."""
    return spec.kv_dtype == "float8_e4m3"


DECODE = Tuning(rows=16, warps=4, stages=3, parts=True, registers=128, kernel="decode")
PREFILL = Tuning(rows=128, warps=4, stages=2, parts=False, kernel="prefill")
LATENT = Tuning(rows=64, warps=8, stages=2, parts=True, kernel="latent")

Choice = tuple[Tuning, Longs, Flags]  # requests, and which are split


def serves(spec: GroupSpec, tree: bool, order: AttentionOrder) -> bool:
    """Whether the warp-specialised kernels can do a group: head sizes, pages and features that they
    know."""
    dense = spec.layout in (Layout.DENSE, Layout.CROSS) and spec.d_qk == spec.d_v
    latent = spec.layout is Layout.LATENT and (spec.d_qk, spec.d_v) == (576, 512)
    return (
        ((dense and spec.d_qk in (64, 128)) or latent)
        and spec.page_size in (16, 32, 64, 128)
        and spec.page_size <= order.tile
        and spec.kv_dtype == "bfloat16"
        and not tree
        and all(attn.soft_cap is None for attn in spec.layers)
    )


def group_of(spec: GroupSpec, tuning: Tuning) -> int:
    """Query heads that share a block's rows: those of a kv head, or one where a block is tokens of
    one head."""
    return 1 if tuning.kernel == "prefill" else spec.group_size


def split_up(spec: GroupSpec, rows: Rows, requests: Longs, tuning: Tuning) -> Choice:
    """Requests of which those are split over programs that have more keys than a multiprocessor's
    share of all that is read, so that one would be busy when the others are done."""
    first, end = rows.q_indptr[requests], rows.q_indptr[requests + 1]
    keys = (rows.hi[end - 1] - rows.lo[first]).astype(np.int64)
    blocks = -(-((end - first) * spec.group_size) // tuning.rows) * spec.kv_heads
    return tuning, requests, keys * (PROGRAMS // 2) > WHOLE * int((keys * blocks).sum())


def choose(
    spec: GroupSpec, rows: Rows, hopper: bool, tree: bool, order: AttentionOrder
) -> list[Choice]:
    """Launch shapes, the requests each serves, and which of those are split over programs.
    `hopper`: the warp-specialised kernels may be used."""
    hopper = hopper and serves(spec, tree, order)
    lens = np.diff(rows.q_indptr).astype(np.int64)
    if hopper and spec.layout is Layout.LATENT:
        return [split_up(spec, rows, np.flatnonzero(lens), LATENT)]
    flat = lens * spec.group_size
    if hopper and len(flat) and 0 < flat.min() and flat.max() <= FEW:  # all there is to most steps
        return [split_up(spec, rows, np.arange(len(flat)), DECODE)]
    small = (lens > 0) & (flat <= FEW)
    long = (lens >= TOKENS) & ~small & (hopper and spec.causal and spec.window is None)
    if int((-(-lens[long] // PREFILL.rows)).sum()) * spec.heads < PREFILL_ITEMS:
        long &= False
    rest = (lens > 0) & ~small & ~long
    whole = many(spec, tree)
    blocks = int((-(-flat[rest] // whole.rows)).sum()) * spec.kv_heads
    if blocks < PROGRAMS:
        whole = some(spec, tree)
    first = alike(few(spec, tree), small)
    if hopper:
        first = split_up(spec, rows, np.flatnonzero(small), DECODE)
    chosen = (first, alike(whole, rest), alike(PREFILL, long))
    return [choice for choice in chosen if len(choice[1])]


def alike(tuning: Tuning, mask: Flags) -> Choice:
    """Requests that are all split over programs, or none of them."""
    requests = np.flatnonzero(mask)
    return tuning, requests, np.full(len(requests), tuning.parts)


def arguments(spec: GroupSpec, page_size: int, order: AttentionOrder, tree: bool) -> Arguments:
    """What kernels are told of a group; `tree`: rows may name keys one by one. Still to come: int32
    tensors of the plan's image, positions, start [T], tail_indptr [T+1], tail_slots and page_ids;
    how a layer scores (c, pre, v_scale, sinks2, CAP); `scratch`; and its tensors: q [T, heads,
    d_qk], k [slots, kv_heads, d_qk], v [slots, kv_heads, d_v], out [T, heads, d_v], lse [T, heads].
    """
    d_qk, d_v = stored_len(spec.d_qk), stored_len(spec.d_v)
    first, rest = pieces(d_qk)
    page_mul, page_shift = divider(page_size)
    latent = spec.layout is Layout.LATENT and d_v == first
    return vars(order.splits) | {
        "heads": spec.heads, "kv_heads": spec.kv_heads, "causal": int(spec.causal),
        "window": spec.window or INT32_MAX, "group": spec.group_size, "page_size": page_size,
        "page_mul": page_mul, "page_shift": page_shift, "PAGE": page_size, "D": d_qk, "D_QK": d_qk,
        "DA": first, "DB": rest, "D_V": d_v, "DV": power(max(d_v, 16)), "TILE": order.tile,
        "LATENT": latent, "TREE": tree,
    }  # fmt: skip


def scratch(part_rows: int, counters: int, width: int, device: torch.device) -> Arguments:
    """Room for `part_rows` rows of parts, `width` values each, and, for a latent cache, the state
    of every program. Counters are zero before and after every launch."""
    rows = max(part_rows, 1)
    states = 64 * multiprocessors(device) if width > 256 else 0
    return {
        "part_ml": torch.empty(rows * 2, dtype=torch.float32, device=device),
        "part_acc": torch.empty(rows * width, dtype=torch.float32, device=device),
        "states": torch.empty(states * width, dtype=torch.float32, device=device),
        "counters": torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
    }


def launch(known: Arguments, table: Tensor, tuning: Tuning) -> None:
    """One launch over the items of `table`. A kernel takes what it has names for: one that takes
    `work` walks it with a program per multiprocessor, others have a program for each of it."""
    kernel, programs = kernels()[tuning.kernel], len(table) * known["kv_heads"]
    known = known | {"items": table, "STAGES": tuning.stages * 128 // known["D"]}
    known |= {"PART": tuning.parts, "ROWS": tuning.rows, "FOLD_ROWS": tuning.fold_rows}
    for name in ("q", "k", "v"):  # in units of 8 elements: 16-byte loads are always aligned
        row, head, column = known[name].stride()
        if row % 8 or head % 8 or column != 1:
            rule = f"{name} has contiguous heads at multiples of 8 elements"
            raise RuleError(rule, f"strides {(row, head, column)}", "Make it contiguous")
        known[name + "_row8"], known[name + "_head8"] = row // 8, head // 8
    if tuning.kernel == "prefill":
        programs = len(table) * known["heads"]
        known["q_desc"] = boxes(known["q"].contiguous(), 64, known["D"])
    for name in ("k", "v"):
        if name + "_desc" in kernel.arg_names:
            known[name + "_desc"] = boxes(known[name], known["PAGE"], 64)
    if "work" in kernel.arg_names:
        known["work"] = programs
        programs = min(multiprocessors(table.device), programs)
    kernel[(programs,)](
        *(known[name] for name in kernel.arg_names),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        maxnreg=tuning.registers,
        enable_fp_fusion=False,
    )


@cache
def kernels() -> dict[str, Any]:
    """By the name that a tuning has for them."""
    from lockstep.kernels.triton import attend, hopper_decode, hopper_latent, hopper_prefill

    return {
        "plain": attend.attend_kernel,
        "prefill": hopper_prefill.prefill_kernel,
        "decode": hopper_decode.decode_kernel,
        "latent": hopper_latent.latent_kernel,
    }


def boxes(tensor: Tensor, rows: int, columns: int) -> Any:
    """How the copy engine sees a tensor of rows: boxes of `rows` by `columns`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from lockstep.kernels.triton.hopper import WIDE

    return TensorDescriptor.from_tensor(tensor.view(len(tensor), -1), [rows, columns], WIDE.value)


def pieces(d_qk: int) -> tuple[int, int]:
    """A head size as one or two powers of two, walked one after the other: 128 = 128 + 0, 192 = 128
    + 64, 576 = 512 + 64."""
    first = max(16, 1 << (d_qk.bit_length() - 1))
    if d_qk <= first:
        return first, 0
    return first, power(max(d_qk - first, 16))


def divider(page_size: int) -> tuple[int, int]:
    """(mul, shift): p // page_size == (2 * p * mul >> 32) >> shift for every 0 <= p < 2**31, and
    mul fits in 32 bits."""
    shift = (page_size - 1).bit_length()
    return -(-(1 << (31 + shift)) // page_size), shift


def multiprocessors(device: torch.device) -> int:
    """Of the card; 1 where there is none."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
