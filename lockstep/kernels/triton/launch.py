"""Launches attention: chooses a launch shape for every request, by lengths and head sizes, and
passes a kernel its arguments by name. A shape changes speed, never bits; `docs/performance.md` has
the measurements. Knows tensors and what rows see, but no plan."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.kernels.triton.items import Flags, Longs, Rows
from lockstep.order import AttentionOrder, stored_len
from lockstep.plan.build import next_power_of_2
from lockstep.types import INT32_MAX, GroupSpec, Layout, RuleError

FEW = 16  # most flat rows (token, head) of a request that are computed as one small block
PROGRAMS = 264  # two per multiprocessor: fewer whole blocks than this are split over programs
WHOLE = 1.05  # a request is split if it has more than this times a multiprocessor's share of keys
TOKENS = 96  # fewest new rows of a request that use the prefill kernel's blocks of 128 tokens
PREFILL_ITEMS = 100  # with fewer such items, the plain kernel computes them

Arguments = dict[str, Any]  # of kernels, by name


@dataclass(frozen=True)
class Tuning:
    """The launch shape of one kernel variant."""

    rows: int  # flat rows (token, head) per block
    warps: int
    stages: int  # tiles in flight; in the warp-specialised kernels, for head size 128
    parts: bool  # one program per split, the last to arrive folds them; a default, see `choose`
    fold_rows: int = 4  # rows that are folded together
    registers: int | None = None  # most registers per thread
    kernel: str = "plain"  # attend.py; or a warp-specialised twin: "prefill", "decode", "latent"


def few(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Returns the shape for one small block per request and kv head, a program per split. Trees
    need twice the registers for a second loop, so twice the warps."""
    if narrow(spec):
        return some(spec, tree)
    warps = 8 if tree else 4
    if spec.d_v > 256:
        return Tuning(rows=16, warps=warps, stages=2, parts=True, fold_rows=1)
    if spec.d_v > 128:
        return Tuning(rows=16, warps=warps, stages=4, parts=True, fold_rows=2)
    return Tuning(rows=16, warps=warps, stages=4, parts=True)


def some(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Returns the shape for blocks of 64 rows, a program per split."""
    if tree and spec.d_v > 128 and not narrow(spec):
        return few(spec, tree)
    if spec.d_v > 256:
        return Tuning(rows=64, warps=8, stages=1 if narrow(spec) else 2, parts=True, fold_rows=1)
    warps = 4 if max(spec.d_qk, spec.d_v) < 128 and not tree else 8
    return Tuning(rows=64, warps=warps, stages=2, parts=True, fold_rows=2)


def many(spec: GroupSpec, tree: bool = False) -> Tuning:
    """Returns the shape for whole blocks, one program for all splits; trees are always split."""
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
    """Returns whether keys have one byte. Then blocks have at least 64 rows, which use wgmma: in
    smaller ones mma.sync would regroup operands widened in registers along K."""
    return spec.kv_dtype == "float8_e4m3"


DECODE = Tuning(rows=16, warps=4, stages=3, parts=True, registers=128, kernel="decode")
PREFILL = Tuning(rows=128, warps=4, stages=2, parts=False, kernel="prefill")  # tokens of one head
LATENT = Tuning(rows=64, warps=8, stages=2, parts=True, kernel="latent")

Choice = tuple[Tuning, Longs, Flags]  # a shape, its requests, and which of them are split


def supported_by_hopper(spec: GroupSpec, tree: bool, order: AttentionOrder) -> bool:
    """Returns whether the warp-specialised kernels support a group's sizes, dtype and features."""
    sizes = (spec.d_qk, spec.d_v)
    dense = spec.layout in (Layout.DENSE, Layout.CROSS) and sizes in ((64, 64), (128, 128))
    latent = spec.layout is Layout.LATENT and sizes == (576, 512)
    pages = spec.page_size in (16, 32, 64, 128) and spec.page_size <= order.tile
    plain = not tree and all(attn.soft_cap is None for attn in spec.layers)
    return (dense or latent) and pages and plain and spec.kv_dtype == "bfloat16"


def group_of(spec: GroupSpec, tuning: Tuning) -> int:
    """Returns how many query heads share a block: all of a kv head; in the prefill kernel one."""
    return 1 if tuning.kernel == "prefill" else spec.group_size


def split_up(spec: GroupSpec, rows: Rows, requests: Longs, tuning: Tuning) -> Choice:
    """Marks requests to split over programs: those with more keys than a multiprocessor's share of
    all keys read, which would keep one busy after the others are done."""
    first, end = rows.q_indptr[requests], rows.q_indptr[requests + 1]
    keys = (rows.hi[end - 1] - rows.lo[first]).astype(np.int64)
    blocks = -(-((end - first) * spec.group_size) // tuning.rows) * spec.kv_heads
    return tuning, requests, keys * (PROGRAMS // 2) > WHOLE * int((keys * blocks).sum())


def choose(
    spec: GroupSpec, rows: Rows, hopper: bool, tree: bool, order: AttentionOrder
) -> list[Choice]:
    """Returns launch shapes, the requests that each computes, and which of those are split over
    programs. `hopper`: the warp-specialised kernels may be used."""
    hopper = hopper and supported_by_hopper(spec, tree, order)
    lens = np.diff(rows.q_indptr).astype(np.int64)
    if hopper and spec.layout is Layout.LATENT:
        return [split_up(spec, rows, np.flatnonzero(lens), LATENT)]
    flat = lens * spec.group_size
    if hopper and len(flat) and 0 < flat.min() and flat.max() <= FEW:  # most steps
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
    """Returns the masked requests, all split over programs or none, as the shape says."""
    requests = np.flatnonzero(mask)
    return tuning, requests, np.full(len(requests), tuning.parts)


def arguments(spec: GroupSpec, page_size: int, order: AttentionOrder, tree: bool) -> Arguments:
    """Returns the arguments that depend on a group only; `tree`: rows may list keys. The caller
    adds the plan's int32 tensors: positions, start [T], tail_indptr [T+1], tail_slots, page_ids; a
    layer's scoring constants (c, pre, v_scale, sinks2, CAP); `scratch`; and q [T, heads, d_qk], k
    [slots, kv_heads, d_qk], v [slots, kv_heads, d_v], out [T, heads, d_v], lse [T, heads]."""
    d_qk, d_v = stored_len(spec.d_qk), stored_len(spec.d_v)
    first, rest = pieces(d_qk)
    page_mul, page_shift = divider(page_size)
    latent = spec.layout is Layout.LATENT and d_v == first
    return vars(order.splits) | {
        "heads": spec.heads, "kv_heads": spec.kv_heads, "causal": int(spec.causal),
        "window": spec.window or INT32_MAX, "group": spec.group_size, "page_size": page_size,
        "page_mul": page_mul, "page_shift": page_shift, "PAGE": page_size, "D": d_qk, "D_QK": d_qk,
        "DA": first, "DB": rest, "D_V": d_v, "DV": next_power_of_2(max(d_v, 16)),
        "TILE": order.tile, "LATENT": latent, "TREE": tree,
    }  # fmt: skip


def scratch(part_rows: int, counters: int, width: int, device: torch.device) -> Arguments:
    """Allocates scratch: `part_rows` rows of parts, `width` values each; for a latent cache also
    the state of every program. Counters are zero before and after every launch."""
    rows = max(part_rows, 1)
    states = 64 * multiprocessors(device) if width > 256 else 0
    return {
        "part_ml": torch.empty(rows * 2, dtype=torch.float32, device=device),
        "part_acc": torch.empty(rows * width, dtype=torch.float32, device=device),
        "states": torch.empty(states * width, dtype=torch.float32, device=device),
        "counters": torch.zeros(max(counters, 1), dtype=torch.int32, device=device),
    }


def launch(known: Arguments, table: Tensor, tuning: Tuning) -> None:
    """Launches one kernel over the items of `table` with the arguments it names. With `work` it has
    one program per multiprocessor, each looping over items; else one per item and kv head."""
    kernel, programs = kernels()[tuning.kernel], len(table) * known["kv_heads"]
    known = known | {"items": table, "STAGES": tuning.stages * 128 // known["D"]}
    known |= {"PART": tuning.parts, "ROWS": tuning.rows, "FOLD_ROWS": tuning.fold_rows}
    for name in ("q", "k", "v"):  # in units of 8 elements: 16-byte loads are always aligned
        row, head, column = known[name].stride()
        if row % 8 or head % 8 or column != 1:
            rule = f"each head of {name} is contiguous and begins at a multiple of 8 elements"
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
    operands = [known[name] for name in kernel.arg_names]
    options = {"num_warps": tuning.warps, "num_stages": tuning.stages, "maxnreg": tuning.registers}
    kernel[(programs,)](*operands, **options, enable_fp_fusion=False)


@cache
def kernels() -> dict[str, Any]:
    """Returns the kernels by `Tuning.kernel`."""
    from lockstep.kernels.triton import attend, hopper_decode, hopper_latent, hopper_prefill

    return {
        "plain": attend.attend_kernel,
        "prefill": hopper_prefill.prefill_kernel,
        "decode": hopper_decode.decode_kernel,
        "latent": hopper_latent.latent_kernel,
    }


def boxes(tensor: Tensor, rows: int, columns: int) -> Any:
    """Returns a TMA descriptor of a tensor of rows, copied in boxes of `rows` by `columns`."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from lockstep.kernels.triton.hopper import WIDE

    return TensorDescriptor.from_tensor(tensor.view(len(tensor), -1), [rows, columns], WIDE.value)


def pieces(d_qk: int) -> tuple[int, int]:
    """Splits a head size into one or two powers of two: 128 = 128 + 0, 576 = 512 + 64."""
    first = max(16, 1 << (d_qk.bit_length() - 1))
    rest = next_power_of_2(max(d_qk - first, 16)) if d_qk > first else 0
    return first, rest


def divider(page_size: int) -> tuple[int, int]:
    """Returns (mul, shift) with p // page_size == (2 * p * mul >> 32) >> shift for 0 <= p < 2**31;
    mul fits in 32 bits."""
    shift = (page_size - 1).bit_length()
    return -(-(1 << (31 + shift)) // page_size), shift


def multiprocessors(device: torch.device) -> int:
    """Returns the GPU's number of multiprocessors, 1 for other devices."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
