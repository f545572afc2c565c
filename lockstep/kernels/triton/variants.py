"""Every kernel variant that may be launched on sm_90, as data: a kernel, its constants, the types
of its arguments and its launch shape, for Qwen3-8B, Qwen3-30B-A3B, gpt-oss and DeepSeek-V3.
Lengths, strides, windows and counts are run-time values and make no variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from lockstep.kernels.triton import cache, moe, rowwise, sample, tuning
from lockstep.kernels.triton.gemm import Tile
from lockstep.kernels.triton.gemm_choice import GRID, tile_for
from lockstep.kernels.triton.launch import Shape
from lockstep.ops import Routing
from lockstep.order import SM90, attention_order
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout

NAMED = {  # arguments of one type: every kernel calls one thing by one name; others are integers
    "*bf16": "x w y residual total q k v out parts",
    "*fp32": "weight weights bias cos sin logits chosen top_logs lse sinks2 part_ml part_acc",
    "*i64": "ints search bins best tokens states sums top_ids last bases",
    "*i32": "ids counts listed peaks items positions start page_ids counters tail_indptr"
    " tail_slots slots row_words moves",
    "fp32": "c pre v_scale eps alpha limit number floor scale",
    "*fp64": "floats",
    "i64": "page_mul",
}
TYPES = {name: kind for kind, names in NAMED.items() for name in names.split()}
KEYS = {"bfloat16": "*bf16", "float16": "*fp16", "float8_e4m3": "*fp8e4nv"}
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
GEMMS = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))


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


def variant(
    name: str, kernel: str, launch: Mapping[str, Any], known_spills: int = 0, **types: str
) -> Variant:
    """From what a kernel is launched with; arguments have the types of their names, but for
    `types`."""
    return Variant(
        name=name,
        kernel=kernel,
        types=TYPES | types,
        constants={key: value for key, value in launch.items() if key.isupper()},
        warps=launch.get("num_warps", 4),
        stages=launch.get("num_stages", 1),
        gluon=kernel.startswith("hopper"),
        registers=launch.get("maxnreg"),
        known_spills=known_spills,
    )


def group(d_qk: int, d_v: int, kv: str = "bfloat16", cap: bool = False) -> GroupSpec:
    """A group of such heads: 32 with 8 of keys, or 128 over a latent cache."""
    latent = d_qk > 512
    return GroupSpec(
        layout=Layout.LATENT if latent else Layout.DENSE,
        heads=128 if latent else 32,
        kv_heads=1 if latent else 8,
        d_qk=d_qk,
        d_v=d_v,
        layers=(AttnSpec(scale=d_qk**-0.5, soft_cap=30.0 if cap else None),),
        kv_dtype="bfloat16" if kv == "float16" else kv,
    )


def plain(
    head: tuple[int, int], shape: str, kv: str = "bfloat16", cap: bool = False, tree: bool = False
) -> Variant:
    """The plain attention kernel, launched as `shape` says: few, some or many rows."""
    d_qk, d_v = head
    chosen = getattr(tuning, shape)(group(d_qk, d_v, kv, cap), tree)
    tile = attention_order(SM90, d_qk, d_v).tile
    made = Shape(d_qk=d_qk, d_v=d_v, tile=tile, latent=d_qk > 512, cap=cap, tree=tree)
    compute = "*fp16" if kv == "float16" else "*bf16"
    feature = (" cap" if cap else "") + (" tree" if tree else "")
    return variant(
        f"attend {d_qk}/{d_v} {shape} {kv}{feature}",
        "attend:attend_kernel",
        made.constants(chosen) | chosen.options,
        KNOWN_SPILLS.get((d_qk, shape, kv, tree), 0),
        **{"q": compute, "out": compute, "k": KEYS[kv], "v": KEYS[kv]},
    )


def hopper(which: str, d: int, page: int) -> Variant:
    """A warp-specialised attention kernel; d is 512 for a latent cache."""
    box, latent = f"tensordesc<bf16[{page}, 64],{LAYOUT}>", which == "latent"
    chosen = {"prefill": tuning.PREFILL, "decode": tuning.DECODE, "latent": tuning.LATENT}[which]
    sizes = {"D": d, "TILE": 128, "STAGES": chosen.stages * 128 // d}
    return variant(
        f"{which} {d} page {page}",
        f"hopper_{which}:{which}_kernel",
        ({} if latent else sizes) | {"PAGE": page} | chosen.options | {"num_stages": 1},
        LATENT_SPILLS if latent else 0,
        **{"q_desc": f"tensordesc<bf16[64, {d}],{LAYOUT}>", "k_desc": box, "v_desc": box},
    )


def attentions() -> Iterator[Variant]:
    """Head sizes, launch shapes, features."""
    shapes, small = ("few", "some", "many"), ((64, 64), (128, 128))
    yield from (plain(head, shape) for head, shape in product(HEADS, shapes))
    yield from (plain(head, shape, tree=True) for head, shape in product(HEADS, shapes[:2]))
    yield from (plain(head, shape, cap=True) for head, shape in product(HEADS[1:3], shapes))
    yield from (plain(head, shape, "float8_e4m3") for head, shape in product(small, shapes[1:]))
    yield plain((576, 512), "some", "float8_e4m3")
    yield from (plain((128, 128), shape, "float16") for shape in shapes)
    pages = (16, 32, 64, 128)
    yield from (hopper(*each) for each in product(("prefill", "decode"), (64, 128), pages))
    yield from (hopper("latent", 512, page) for page in pages[:3])


def writers() -> Iterator[Variant]:
    """Of the cache: 8 heads of 128, or a latent row; and its mover."""
    sizes = {"dense": {"KV_HEADS": 8, "D": 128}, "latent": {"KV_HEADS": 1, "D": 576}}
    for kv, (name, size) in product(("bfloat16", "float8_e4m3"), sizes.items()):
        stored = getattr(torch, KV_FORMATS[kv].torch_name)
        launch = size | {"LARGEST": cache.largest(stored), "BLOCK": 1024}
        yield variant(f"write {name} {kv}", "cache:write_kernel", launch, cache=KEYS[kv])
    for rows, words in ((16, 64), (256, 64), (4096, 4)):
        launch = {"ROWS": rows, "WORDS": words, "num_warps": 8}
        yield variant(f"move {rows} rows", "cache:move_kernel", launch)


def gemms() -> Iterator[Variant]:
    """Every tile that the table names for the shapes, and a latent head's batched GEMM."""
    for n, k in GEMMS:
        for tile in dict.fromkeys(tile_for(n, k, rows) for rows in GRID):
            launch = {"N": n, "K": k, "GROUP": tile.group} | tile.constants
            yield variant(f"gemm {n}x{k} {tile.name}", "gemm:gemm_kernel", launch)
    tile = Tile(rows=64, columns=64, depth=128, warps=4, stages=3)
    for n, k in ((512, 128), (128, 512)):
        launch = {"N": n, "K": k} | tile.constants
        yield variant(f"batched gemm {n}x{k}", "gemm:batched_gemm_kernel", launch)


def rows() -> Iterator[Variant]:
    """Norms, rotations, gates, biases."""
    for n in (4096, 2880):
        launch = rowwise.whole_row(n)
        yield variant(f"rms norm {n}", "rowwise:rms_norm_kernel", launch | {"ADD": False})
        yield variant(f"add rms norm {n}", "rowwise:rms_norm_kernel", launch | {"ADD": True})
        yield variant(f"layer norm {n}", "rowwise:layer_norm_kernel", launch)
    turn = {"D": 128, "WIDTH": 128, "LEVELS": 7, "HALF": 64, "HALF_WIDTH": 64, "TAIL_WIDTH": 1}
    turn |= {"BLOCK": rowwise.HEADS, "INTERLEAVED": False}
    for name, norm in (("qk norm rope 128", True), ("rope 128", False)):
        yield variant(name, "rowwise:qk_norm_rope_kernel", turn | {"NORM": norm})
    wide = {"N": 12288, "COLUMNS": rowwise.COLUMNS}
    for name, kind in (("silu", 0), ("gelu", 1), ("gelu tanh", 2), ("clamped", 6)):
        yield variant(f"gate {name}", "rowwise:gate_kernel", wide | {"KIND": kind})
    yield variant("bias", "rowwise:map_kernel", wide | {"N": 6144, "KIND": 3, "BIAS": True})


def experts() -> Iterator[Variant]:
    """128 experts, 8 of them, hidden 2048, inner 768; and the choice from groups."""
    for name, row_count in (("few", 1), ("many", 256)):
        launch = {"N": 128, "K": 2048} | moe.router_launch(row_count)
        yield variant(f"router {name}", "moe:router_kernel", launch, w="*fp32", y="*fp32")
    of_128 = Routing(k=8, experts=128, norm=True)
    of_256 = Routing(8, 256, "sigmoid", norm=True, groups=8, keep=4)
    for name, routing, bias in (("128", of_128, False), ("256 groups", of_256, True)):
        yield variant(f"route 8 of {name}", "moe:route_kernel", moe.route_launch(routing, bias))
    yield variant("count pairs", "moe:count_kernel", {"CHUNK": moe.CHUNK})
    listed = {"EXPERTS": 128, "WIDTH": 128, "CHUNK": moe.CHUNK}
    yield variant("list pairs", "moe:list_kernel", listed)
    shape = {"EXPERTS": 128, "WIDTH": 128, "BIAS": False}
    for n, k, per_row in ((1536, 2048, 8), (2048, 768, 1)):
        for row_count in (16, 64):
            tile = Tile(rows=row_count, columns=64, depth=128, warps=4, stages=4)
            launch = shape | {"N": n, "K": k, "PER_ROW": per_row} | tile.constants
            name = f"grouped gemm {n}x{k} {row_count}"
            yield variant(name, "moe:grouped_gemm_kernel", launch, bias="*bf16")
    yield variant("combine 8", "moe:combine_kernel", {"N": 2048, "K": 8, "COLUMNS": 1024})


def samplers() -> Iterator[Variant]:
    """The sampler and log-probabilities: one binary each."""
    shared, lone = sample.shared_launch(), sample.lone_launch()
    yield variant("sample peak", "sample:peak_kernel", shared | {"TEMPERED": True})
    weigh = {"WEIGH": True}
    yield variant("sample start", "sample:start_kernel", weigh | {"PARTS": sample.PARTS})
    yield variant("sample bin", "sample:bin_kernel", shared | weigh)
    yield variant("sample digit", "sample:digit_kernel", weigh | {"FIRST": True})
    for name, launch in (("noisy", shared), ("weigh", shared), ("describe", lone)):
        yield variant(f"sample {name}", f"sample:{name}_kernel", launch)
    yield variant("sample pick", "sample:pick_kernel", {"PARTS": sample.PARTS, "num_warps": 1})


def variants() -> tuple[Variant, ...]:
    """All of them, each once."""
    found = (*attentions(), *writers(), *gemms(), *rows(), *experts(), *samplers())
    return tuple({each.name: each for each in found}.values())
