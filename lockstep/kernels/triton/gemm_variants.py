"""The variants of GEMM, row kernels, experts and sampler, as `variants.py` lists attention's: what
is compiled without a GPU.

`variants()` is the hook: a list of the same `Variant`s, for the shapes of Qwen3-8B, Qwen3-30B-A3B,
gpt-oss and DeepSeek-V3. Rows, vocabularies and head counts are run-time values and make no
variants. Called by `lockstep kernels --compile` and by the tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lockstep.kernels.triton import moe, rowwise, sample
from lockstep.kernels.triton.gemm import Tile
from lockstep.kernels.triton.gemm_choice import GRID, tile_for
from lockstep.kernels.triton.variants import Variant

TYPES = {  # arguments by name: every kernel here calls one thing by one name
    **dict.fromkeys(("x", "w", "y", "residual", "total", "q", "k", "parts"), "*bf16"),
    **dict.fromkeys(
        ("weight", "weights", "bias", "cos", "sin", "logits", "chosen", "top_logs"), "*fp32"
    ),
    **dict.fromkeys(("ids", "counts", "listed", "peaks"), "*i32"),
    **dict.fromkeys(("ints", "best", "tokens", "states", "sums", "top_ids", "last"), "*i64"),
    **dict.fromkeys(("eps", "alpha", "limit", "number", "floor", "scale"), "fp32"),
    "floats": "*fp64",
}
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
HOPPER_TILES = (
    Tile(rows=128, columns=128, depth=64, warps=8, stages=5, hopper=True),
    Tile(rows=128, columns=256, depth=64, warps=8, stages=3, hopper=True),
    Tile(rows=128, columns=64, depth=128, warps=8, stages=4, hopper=True),
)
LAYOUT = (
    "NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)


def plain(
    name: str, kernel: str, constants: dict[str, Any], warps: int = 4, stages: int = 1, **types: str
) -> Variant:
    """A variant whose arguments have the types of their names, but for `types`."""
    return Variant(
        name=name,
        kernel=kernel,
        types=TYPES | types,
        constants=constants,
        warps=warps,
        stages=stages,
    )


def tile_constants(tile: Tile) -> dict[str, int]:
    """What every GEMM kernel is compiled for."""
    return {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}


def hopper(n: int, k: int, tile: Tile) -> Variant:
    """The warp-specialised GEMM."""
    half = tile.rows // 2
    boxes = {
        "x_desc": (half, tile.depth),
        "w_desc": (tile.columns, tile.depth),
        "y_desc": (half, tile.columns),
    }
    return Variant(
        name=f"gemm {n}x{k} {tile.name}",
        kernel="gemm_hopper:gemm_hopper_kernel",
        types={
            name: f"tensordesc<bf16[{rows}, {columns}],{LAYOUT}>"
            for name, (rows, columns) in boxes.items()
        },
        constants={"N": n, "K": k, "STAGES": tile.stages, "GROUP": tile.group}
        | tile_constants(tile),
        warps=4,
        gluon=True,
    )


def gemms() -> Iterator[Variant]:
    """Every tile that the table names for the shapes, the warp-specialised candidates, and a latent
    head's batched GEMM."""
    for n, k in SHAPES:
        for tile in dict.fromkeys(tile_for(n, k, rows) for rows in GRID):
            constants = {"N": n, "K": k, "GROUP": tile.group} | tile_constants(tile)
            yield plain(
                f"gemm {n}x{k} {tile.name}", "gemm:gemm_kernel", constants, tile.warps, tile.stages
            )
    yield from (hopper(4096, 12288, tile) for tile in HOPPER_TILES)
    for n, k in ((512, 128), (128, 512)):
        constants = {"N": n, "K": k, "ROWS": 64, "COLUMNS": 64, "DEPTH": 128}
        yield plain(f"batched gemm {n}x{k}", "gemm:batched_gemm_kernel", constants, stages=3)


def rows() -> Iterator[Variant]:
    """Norms, rotations, gates, biases."""
    for n in (4096, 2880):
        wide = rowwise.width(n)
        shape = {"N": n, "WIDTH": wide, "LEVELS": wide.bit_length() - 1}
        yield plain(
            f"rms norm {n}", "rowwise:rms_norm_kernel", shape | {"ADD": False}, rowwise.warps(n)
        )
        yield plain(
            f"add rms norm {n}", "rowwise:rms_norm_kernel", shape | {"ADD": True}, rowwise.warps(n)
        )
        yield plain(f"layer norm {n}", "rowwise:layer_norm_kernel", shape, rowwise.warps(n))
    turn = {
        "D": 128,
        "WIDTH": 128,
        "LEVELS": 7,
        "HALF": 64,
        "HALF_WIDTH": 64,
        "TAIL_WIDTH": 1,
        "BLOCK": rowwise.HEADS,
    }
    for norm in (False, True):
        name = "qk norm rope 128" if norm else "rope 128"
        yield plain(
            name, "rowwise:qk_norm_rope_kernel", turn | {"NORM": norm, "INTERLEAVED": False}
        )
    for name, kind in (("silu", 0), ("gelu", 1), ("gelu tanh", 2), ("clamped", 6)):
        yield plain(
            f"gate {name}",
            "rowwise:gate_kernel",
            {"N": 12288, "KIND": kind, "COLUMNS": rowwise.COLUMNS},
        )
    yield plain(
        "bias",
        "rowwise:map_kernel",
        {"N": 6144, "KIND": 3, "BIAS": True, "COLUMNS": rowwise.COLUMNS},
    )


def experts() -> Iterator[Variant]:
    """128 experts, 8 of them, hidden 2048, inner 768; and the choice from groups."""
    shape = {"N": 128, "K": 2048, "ROWS": 16, "COLUMNS": 16, "DEPTH": 64}
    yield plain("router 128x2048", "moe:router_kernel", shape, stages=3, w="*fp32", y="*fp32")
    route = {
        "BIAS": False,
        "NORM": True,
        "GROUPS": 1,
        "KEEP": 1,
        "PAIRS": False,
        "K": 8,
        "K_WIDTH": 8,
        "K_LEVELS": 3,
        "GROUP_WIDTH": 2,
    }
    yield plain(
        "route 8 of 128",
        "moe:route_kernel",
        route | {"SCORE": 0, "EXPERTS": 128, "WIDTH": 128, "LEVELS": 7},
        warps=1,
    )
    grouped = {
        "SCORE": 1,
        "EXPERTS": 256,
        "WIDTH": 256,
        "LEVELS": 8,
        "BIAS": True,
        "GROUPS": 8,
        "KEEP": 4,
        "PAIRS": True,
        "GROUP_WIDTH": 8,
    }
    yield plain("route 8 of 256 groups", "moe:route_kernel", route | grouped, warps=1)
    yield plain("count pairs", "moe:count_kernel", {"CHUNK": moe.CHUNK})
    yield plain("list pairs", "moe:list_kernel", {"EXPERTS": 128, "WIDTH": 128, "CHUNK": moe.CHUNK})
    for n, k, per_row in ((1536, 2048, 8), (2048, 768, 1)):
        for row_count in (16, 64):
            shape = {
                "EXPERTS": 128,
                "WIDTH": 128,
                "N": n,
                "K": k,
                "PER_ROW": per_row,
                "BIAS": False,
            }
            constants = shape | {"ROWS": row_count, "COLUMNS": 64, "DEPTH": 128}
            yield plain(
                f"grouped gemm {n}x{k} {row_count}",
                "moe:grouped_gemm_kernel",
                constants,
                stages=4,
                bias="*bf16",
            )
    yield plain("combine 8", "moe:combine_kernel", {"N": 2048, "K": 8, "COLUMNS": 1024})


def samplers() -> Iterator[Variant]:
    """The sampler and log-probabilities: one binary each."""
    shape = {"PARTS": sample.PARTS, "BLOCK": sample.BLOCK}
    yield plain("sample peak", "sample:peak_kernel", shape | {"TEMPERED": True})
    for name in ("cut", "noisy", "weigh", "describe"):
        yield plain(f"sample {name}", f"sample:{name}_kernel", shape)
    yield plain("sample pick", "sample:pick_kernel", {"PARTS": sample.PARTS}, warps=1)


def variants() -> list[Variant]:
    """All of them."""
    return [*gemms(), *rows(), *experts(), *samplers()]
