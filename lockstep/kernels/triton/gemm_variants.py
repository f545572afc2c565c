"""What of the GEMM and the row kernels is compiled for a device, for whoever compiles without one: kernel, signature, constants, options.

The hook of `lockstep kernels --compile`: `variants()` is the list of a few model shapes; `compile_variant` compiles one for sm_90 and
returns registers, spills and shared memory. Knows signatures; launches nothing. Called by the command and by the tests.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.kernels.triton import gemm_hopper, moe, rowwise, sample
from lockstep.kernels.triton.gemm import Tile, batched_gemm_kernel, gemm_kernel
from lockstep.kernels.triton.gemm_choice import GRID, tile_for

POINTERS = {  # arguments by name: every kernel here calls one thing by one name
    **dict.fromkeys(("x", "w", "y", "residual", "total", "q", "k", "parts"), "*bf16"),
    **dict.fromkeys(("weight", "weights", "bias", "cos", "sin", "logits"), "*fp32"),
    **dict.fromkeys(("ids", "counts", "listed"), "*i32"),
    **dict.fromkeys(("eps", "alpha", "limit", "number", "floor", "scale"), "fp32"),
}
SHAPES = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))  # Qwen3-8B
WGMMA, MMA = "HGMMA", "HMMA"


@dataclass(frozen=True, eq=False)
class Variant:
    """One binary."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    options: dict[str, Any]
    types: dict[str, str] = field(default_factory=dict)  # where an argument has another type than POINTERS says
    gluon: bool = False

    @property
    def signature(self) -> dict[str, str]:
        """Argument → type, in order."""
        types = POINTERS | self.types
        return {n: "constexpr" if n in self.constants else types.get(n, "i32") for n in self.kernel.arg_names}


@dataclass(frozen=True)
class Compiled:
    """What the compiler says of a variant."""

    name: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    serialized: bool  # ptxas gave up overlapping warpgroup products
    float64_fmas: int  # contracted products and sums of float64 in the text given to ptxas
    matrix: frozenset[str]  # which matrix instructions it has


def gemm_variants() -> Iterator[Variant]:
    """Every tile that the table names for the model shapes, and the warp-specialised candidates."""
    for n, k in SHAPES:
        for tile in dict.fromkeys(tile_for(n, k, rows) for rows in GRID):
            constants = {"N": n, "K": k, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "GROUP": tile.group}
            yield Variant(f"gemm-{n}x{k}-{tile.name}", gemm_kernel, constants, {"num_warps": tile.warps, "num_stages": tile.stages})
    for tile in (Tile(128, 128, 64, 8, 5, 8, True), Tile(128, 256, 64, 8, 3, 8, True), Tile(128, 64, 128, 8, 4, 8, True)):
        kernel, types, constants, options = gemm_hopper.hopper_variant(4096, 12288, tile)
        yield Variant(f"gemm-4096x12288-{tile.name}", kernel, constants, options, types, gluon=True)
    tile = Tile(64, 64, 128, 4, 3)
    constants = {"N": 512, "K": 128, "ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth}
    yield Variant(f"batched-gemm-512x128-{tile.name}", batched_gemm_kernel, constants, {"num_warps": 4, "num_stages": 3})


def row_variants() -> Iterator[Variant]:
    """Norms, rotations, gates of Qwen3-8B and gpt-oss."""
    plain = {"enable_fp_fusion": False}
    for n in (4096, 2880):
        wide = rowwise.width(n)
        shape = {"N": n, "WIDTH": wide, "LEVELS": wide.bit_length() - 1}
        options = plain | {"num_warps": rowwise.warps(n)}
        yield Variant(f"rms-norm-{n}", rowwise.rms_norm_kernel, shape | {"ADD": False}, options)
        yield Variant(f"add-rms-norm-{n}", rowwise.rms_norm_kernel, shape | {"ADD": True}, options)
        yield Variant(f"layer-norm-{n}", rowwise.layer_norm_kernel, shape, options)
    four = plain | {"num_warps": 4}
    turn = {
        "D": 128,
        "WIDTH": 128,
        "LEVELS": 7,
        "HALF": 64,
        "HALF_WIDTH": 64,
        "TAIL_WIDTH": 1,
        "BLOCK": rowwise.HEADS,
        "INTERLEAVED": False,
    }
    for norm in (False, True):
        yield Variant(f"qk-norm-rope-128-{norm}", rowwise.qk_norm_rope_kernel, turn | {"NORM": norm}, four)
    for kind in (0, 1, 2, 6):
        yield Variant(f"gate-{kind}", rowwise.gate_kernel, {"N": 12288, "KIND": kind, "COLUMNS": rowwise.COLUMNS}, four)
    yield Variant("bias", rowwise.map_kernel, {"N": 6144, "KIND": 3, "BIAS": True, "COLUMNS": rowwise.COLUMNS}, four)


def moe_variants() -> Iterator[Variant]:
    """Qwen3-30B-A3B: 128 experts, 8 of them, hidden 2048, inner 768; and the grouped choice of DeepSeek-V3."""
    yield Variant("router-128x2048", moe.router_kernel, {"N": 128, "K": 2048, "ROWS": 16, "COLUMNS": 16, "DEPTH": 64},
                  {"num_warps": 4, "num_stages": 3}, {"w": "*fp32", "y": "*fp32"})  # fmt: skip
    route = {"SCORE": 0, "BIAS": False, "NORM": True, "GROUPS": 1, "KEEP": 1, "PAIRS": False, "K": 8, "K_WIDTH": 8, "K_LEVELS": 3}
    one = {"num_warps": 1, "enable_fp_fusion": False}
    yield Variant("route-8-of-128", moe.route_kernel, route | {"EXPERTS": 128, "WIDTH": 128, "LEVELS": 7, "GROUP_WIDTH": 2}, one)
    grouped = {"SCORE": 1, "BIAS": True, "GROUPS": 8, "KEEP": 4, "PAIRS": True, "EXPERTS": 256, "WIDTH": 256, "LEVELS": 8, "GROUP_WIDTH": 8}
    yield Variant("route-8-of-256-groups", moe.route_kernel, route | grouped, one)
    yield Variant("count-pairs", moe.count_kernel, {"CHUNK": moe.CHUNK}, {"num_warps": 4})
    yield Variant("list-pairs", moe.list_kernel, {"EXPERTS": 128, "WIDTH": 128, "CHUNK": moe.CHUNK}, {"num_warps": 4})
    for n, k, rows in ((1536, 2048, 16), (1536, 2048, 64), (2048, 768, 16), (2048, 768, 64)):
        shape = {"EXPERTS": 128, "WIDTH": 128, "N": n, "K": k, "PER_ROW": 8 if k == 2048 else 1, "BIAS": False}
        constants = shape | {"ROWS": rows, "COLUMNS": 64, "DEPTH": 128}
        options = {"num_warps": 4, "num_stages": 4, "enable_fp_fusion": False}
        yield Variant(f"grouped-gemm-{n}x{k}-{rows}", moe.grouped_gemm_kernel, constants, options, {"bias": "*bf16"})
    yield Variant("combine-8", moe.combine_kernel, {"N": 2048, "K": 8, "COLUMNS": 1024}, {"num_warps": 4, "enable_fp_fusion": False})


def sample_variants() -> Iterator[Variant]:
    """The sampler and log-probabilities: one binary each for every vocabulary."""
    types = {"logits": "*fp32", "floats": "*fp64", "last": "*i64", "peaks": "*i32"}
    types |= dict.fromkeys(("ints", "best", "tokens", "states", "sums", "top_ids"), "*i64")
    types |= dict.fromkeys(("chosen", "top_logs"), "*fp32")
    shape = {"PARTS": sample.PARTS, "BLOCK": sample.BLOCK}
    options = {"num_warps": 4, "enable_fp_fusion": False}
    yield Variant("sample-peak", sample.peak_kernel, shape | {"TEMPERED": True}, options, types)
    for name in ("cut", "noisy", "weigh", "describe"):
        yield Variant(f"sample-{name}", getattr(sample, f"{name}_kernel"), shape, options, types)
    yield Variant("sample-pick", sample.pick_kernel, {"PARTS": sample.PARTS}, {"num_warps": 1}, types)


def variants() -> list[Variant]:
    """All of them."""
    return [*gemm_variants(), *row_variants(), *moe_variants(), *sample_variants()]


def compile_variant(variant: Variant) -> Compiled:
    """Compiles for sm_90, with or without a GPU, through Triton's cache."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    names, signature = variant.kernel.arg_names, variant.signature
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if signature[name].startswith("*")}
    source = (GluonASTSource if variant.gluon else ASTSource)(
        variant.kernel, signature, {(names.index(name),): value for name, value in variant.constants.items()}, aligned
    )
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=variant.options)
    said, matrix = inspect(kernel)
    registers, spills = re.search(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill stores", said)
    return Compiled(
        name=variant.name,
        registers=int(registers[1]) if registers else -1,
        spill_bytes=sum(map(int, spills)),
        shared_bytes=kernel.metadata.shared,
        serialized="serialized" in said,
        float64_fmas=len(re.findall(r"fma\.rn\.f64", kernel.asm["ptx"])),
        matrix=matrix,
    )


def inspect(kernel: Any) -> tuple[str, frozenset[str]]:
    """What ptxas says of a compiled kernel, and its matrix instructions."""
    import triton

    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        text, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        text.write_text(kernel.asm["ptx"])
        binary.write_bytes(kernel.asm["cubin"])
        command = [tools / "ptxas", "-v", "--gpu-name", "sm_90a", text, "-o", Path(folder, "out")]
        said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([str(tools / "cuobjdump"), "-sass", str(binary)], capture_output=True, text=True, check=True).stdout
    return said, frozenset(name for name in (WGMMA, MMA) if re.search(rf"\b{name}\b", sass))
