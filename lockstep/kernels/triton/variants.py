"""Every kernel variant that may be launched on sm_90, as data: what `lockstep kernels --compile`
compiles and CI looks at.

A variant is a kernel, its compile-time constants, the types of its arguments and its launch shape.
Page size, lengths, strides, windows, group sizes and head counts are run-time values and make no
variants. Knows the tunings; knows nothing of how one compiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.kernels.triton import tuning
from lockstep.kernels.triton.cache import largest
from lockstep.kernels.triton.launch import Shape, Tuning
from lockstep.order import SM90, attention_order
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout

TYPES = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3": "fp8e4nv"}
# arguments that attention kernels share; those that are in no table are integers
SHARED = (
    dict.fromkeys(("lse", "sinks2", "part_ml", "part_acc"), "*fp32")
    | dict.fromkeys(("c", "pre", "v_scale"), "fp32")
    | dict.fromkeys(("items", "positions", "start", "page_ids", "counters"), "*i32")
    | dict.fromkeys(("tail_indptr", "tail_slots"), "*i32")
    | {"page_mul": "i64"}
)
LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)
# 64 rows of 512 values and their widened keys do not fit in 255 registers; neither does a latent
# tree's second loop
KNOWN_SPILLS = {
    (576, "some", "float8_e4m3", False): 64,
    (576, "few", "bfloat16", True): 16,
    (576, "some", "bfloat16", True): 16,
}
LATENT_SPILLS = 25  # addresses and scalars, read once a tile, beside 128 values per thread
HEADS = ((64, 64), (128, 128), (256, 256), (192, 128), (576, 512))


@dataclass(frozen=True)
class Variant:
    """One binary. `kernel` names a function of this folder as module:function; `types` maps its
    arguments to Triton's types."""

    name: str
    kernel: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 1
    gluon: bool = False
    registers: int | None = None
    known_spills: int = 0  # accesses to spilled registers in its loops that are known and stated


def group(d_qk: int, d_v: int, kv: str, cap: bool = False) -> GroupSpec:
    """A group with these sizes, as the tunings want to see one."""
    latent = d_qk > 512
    layout, heads, kv_heads = (Layout.LATENT, 128, 1) if latent else (Layout.DENSE, 32, 8)
    attn = AttnSpec(scale=d_qk**-0.5, soft_cap=30.0 if cap else None)
    return GroupSpec(
        layout, heads, kv_heads, d_qk, d_v, (attn,), kv_dtype="bfloat16" if kv == "float16" else kv
    )


def attend(
    d_qk: int,
    d_v: int,
    shape_name: str,
    kv: str = "bfloat16",
    cap: bool = False,
    tree: bool = False,
) -> Variant:
    """The plain kernel."""
    spec = group(d_qk, d_v, kv, cap)
    chosen: Tuning = {"few": tuning.few, "some": tuning.some, "many": tuning.many}[shape_name](
        spec, tree
    )
    tile = attention_order(SM90, d_qk, d_v).tile
    shape = Shape(
        d_qk=d_qk, d_v=d_v, tile=tile, latent=spec.layout is Layout.LATENT, cap=cap, tree=tree
    )
    compute = "*fp16" if kv == "float16" else "*bf16"
    keys = {"k": f"*{TYPES[kv]}", "v": f"*{TYPES[kv]}"}
    feature = "".join((" cap" if cap else "", " tree" if tree else ""))
    return Variant(
        name=f"attend {d_qk}/{d_v} {shape_name} {kv}{feature}",
        kernel="attend:attend_kernel",
        types={"q": compute, "out": compute, **keys, **SHARED},
        constants=shape.constants(chosen),
        warps=chosen.warps,
        stages=chosen.stages,
        registers=chosen.registers,
        known_spills=KNOWN_SPILLS.get((d_qk, shape_name, kv, tree), 0),
    )


def hopper(which: str, d: int, page: int) -> Variant:
    """The warp-specialised kernels; d is 512 for a latent cache."""
    box = f"tensordesc<bf16[{page}, 64],{LAYOUT}>"
    own = {"q_desc": f"tensordesc<bf16[64, {d}],{LAYOUT}>", "q": "*bf16", "out": "*bf16"}
    chosen = {"prefill": tuning.PREFILL, "decode": tuning.DECODE, "latent": tuning.LATENT}[which]
    sizes = {"D": d, "TILE": 128, "STAGES": chosen.stages * 128 // d, "PAGE": page}
    return Variant(
        name=f"{which} {d} page {page}",
        kernel=f"hopper_{which}:{which}_kernel",
        types={"k_desc": box, "v_desc": box, **own, **SHARED},
        constants={"PAGE": page} if which == "latent" else sizes,
        warps=chosen.warps,
        gluon=True,
        registers=chosen.registers,
        known_spills=LATENT_SPILLS if which == "latent" else 0,
    )


def write(kv: str, latent: bool) -> Variant:
    """The cache's writer: 8 heads of 128, or a latent row."""
    types = {"x": "*bf16", "cache": f"*{TYPES[kv]}", "slots": "*i32", "scale": "fp32"}
    sizes = {"KV_HEADS": 1, "D": 576} if latent else {"KV_HEADS": 8, "D": 128}
    stored = getattr(torch, KV_FORMATS[kv].torch_name)
    constants = sizes | {"LARGEST": largest(stored), "BLOCK": 1024}
    name = f"write {'latent' if latent else 'dense'} {kv}"
    return Variant(name, "kv:write_kernel", types, constants, warps=4)


def move(rows: int, words: int) -> Variant:
    """The cache's mover."""
    types = {"bases": "*i64", "row_words": "*i32", "moves": "*i32"}
    return Variant(
        f"move {rows} rows", "kv:move_kernel", types, {"ROWS": rows, "WORDS": words}, warps=8
    )


def variants() -> tuple[Variant, ...]:
    """All of them; those of GEMM, row kernels, experts and sampler stand in their own file."""
    from lockstep.kernels.triton import gemm_variants  # it makes `Variant`s

    shapes = ("few", "some", "many")
    found = [attend(*head, shape) for head in HEADS for shape in shapes]
    found += [attend(*head, shape, tree=True) for head in HEADS for shape in ("few", "some")]
    found += [
        attend(*head, shape, cap=True) for head in ((128, 128), (256, 256)) for shape in shapes
    ]
    found += [
        attend(*head, shape, kv="float8_e4m3")
        for head in ((64, 64), (128, 128))
        for shape in ("some", "many")
    ]
    found.append(attend(576, 512, "some", kv="float8_e4m3"))
    found += [attend(128, 128, shape, kv="float16") for shape in shapes]
    found += [
        hopper(which, d, page)
        for which in ("prefill", "decode")
        for d in (64, 128)
        for page in (16, 32, 64, 128)
    ]
    found += [hopper("latent", 512, page) for page in (16, 32, 64)]
    found += [write(kv, latent) for kv in ("bfloat16", "float8_e4m3") for latent in (False, True)]
    found += [move(16, 64), move(256, 64), move(4096, 4)]
    found += gemm_variants.variants()
    return tuple({v.name: v for v in found}.values())
