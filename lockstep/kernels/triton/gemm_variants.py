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
from lockstep.ops import Routing

BF16 = ("x", "w", "y", "residual", "total", "q", "k", "parts")
FP32 = ("weight", "weights", "bias", "cos", "sin", "logits", "chosen", "top_logs")
INT64 = ("ints", "search", "bins", "best", "tokens", "states", "sums", "top_ids", "last")
TYPES = {  # arguments by name: every kernel here calls one thing by one name
    **dict.fromkeys(BF16, "*bf16"),
    **dict.fromkeys(FP32, "*fp32"),
    **dict.fromkeys(("ids", "counts", "listed", "peaks"), "*i32"),
    **dict.fromkeys(INT64, "*i64"),
    **dict.fromkeys(("eps", "alpha", "limit", "number", "floor", "scale"), "fp32"),
    "floats": "*fp64",
}
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))


def variant(name: str, kernel: str, launch: dict[str, Any], **types: str) -> Variant:
    """From what a kernel is launched with; arguments have the types of their names, but for
    `types`."""
    return Variant(
        name=name,
        kernel=kernel,
        types=TYPES | types,
        constants={key: value for key, value in launch.items() if key.isupper()},
        warps=launch.get("num_warps", 4),
        stages=launch.get("num_stages", 1),
    )


def gemms() -> Iterator[Variant]:
    """Every tile that the table names for the shapes, and a latent head's batched GEMM."""
    for n, k in SHAPES:
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


def variants() -> list[Variant]:
    """All of them."""
    return [*gemms(), *rows(), *experts(), *samplers()]
