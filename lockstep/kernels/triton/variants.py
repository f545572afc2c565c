"""The kernel variants of four models on sm_90, and the cost of each: registers, spills, shared
memory. Compiled without a GPU.

Variants are what the operations and attention launch for Qwen3-8B, Qwen3-30B-A3B, gpt-oss and
DeepSeek-V3. Triton's hook records the launches and none runs: tensors have shapes but no memory.
Lengths, windows and counts are run-time values and make no variants. To add a kernel, add a call
here. Triton caches binaries by a digest of all that they depend on, so unchanged ones are not
compiled again. `lab.binaries` checks the costs.
"""

import importlib
import json
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from lockstep.kernels.cuda.ops import FEW, MANY
from lockstep.kernels.triton import cache, launch, moe, rowwise, sample
from lockstep.kernels.triton.gemm import gemm
from lockstep.kernels.triton.gemm_choice import GRID, tile_for
from lockstep.kernels.triton.items import ITEM
from lockstep.ops import CosSin, Heads, Routing
from lockstep.order import SM90, attention_order
from lockstep.types import KV_FORMATS, AttnSpec, GroupSpec, Layout, RuleError

HEADS = ((64, 64), (128, 128), (256, 256), (192, 128), (576, 512))
GEMMS = ((6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (151936, 4096))
ROWS = 3  # neither 1 nor a multiple of 16, for which Triton would compile another variant
Launch = tuple[Any, ...]  # a label for the variant's name, then a function and its arguments

half = partial(torch.empty, dtype=torch.bfloat16, device="meta")
floats = partial(torch.empty, dtype=torch.float32, device="meta")
ints = partial(torch.empty, dtype=torch.int32, device="meta")
longs = partial(torch.empty, dtype=torch.int64, device="meta")


# ---- launches ----


@contextmanager
def offline(hook: Callable[..., bool] | None) -> Iterator[None]:
    """Lets Triton compile for sm_90 without a GPU; launches are passed to `hook`, if any."""
    before, device = driver._active, object()  # a new device, for which nothing is compiled yet
    card = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: device,
        get_current_stream=lambda device: 0,
    )
    driver.set_active(card)
    triton.knobs.runtime.jit_cache_hook = hook
    try:
        yield
    finally:
        triton.knobs.runtime.jit_cache_hook = None
        driver.set_active(before)


def record(found: dict[str, str], label: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
    """Records a launch, named by kernel, label and constants that are True; True: do not run it."""
    names = fn.jit_function.arg_names
    on = [names[at].lower() for (at,), value in compile["constants"].items() if value is True]
    name = " ".join((fn.name.removesuffix("_kernel"), label, *on))
    if found.setdefault(name, compile["specialization_data"]) != compile["specialization_data"]:
        raise RuleError("each variant has its own name", name, "Give the launch another label")
    return True


def variants() -> dict[str, str]:
    """Returns all variants by name, each as the string that Triton's `preload` takes."""
    found: dict[str, str] = {}
    for label, function, *arguments in (*attentions(), *gemms(), *rows(), *experts()):
        with offline(partial(record, found, label)):
            function(*arguments)
    return found


def group(d_qk: int, d_v: int, kv: str = "bfloat16", cap: float | None = None) -> GroupSpec:
    """Returns a group of these head sizes: 32 heads over 8 kv heads, or 128 over a latent cache."""
    heads: dict[str, Any] = {"layout": Layout.DENSE, "heads": 32, "kv_heads": 8}
    if d_qk > 512:
        heads = {"layout": Layout.LATENT, "heads": 128, "kv_heads": 1}
    layers = (AttnSpec(scale=d_qk**-0.5, soft_cap=cap),)
    return GroupSpec(**heads, d_qk=d_qk, d_v=d_v, layers=layers, kv_dtype=kv)


def attend(
    head: tuple[int, int], shape: Any, kv: str = "bfloat16", page: int = 16,
    cap: float | None = None, tree: bool = False,
) -> Launch:  # fmt: skip
    """Returns an attention launch; `shape` is a Tuning or a function of `launch` that gives one."""
    spec, label = group(*head, kv, cap), f"{head[0]}/{head[1]} {kv}"
    if isinstance(shape, launch.Tuning):
        label += f" page {page}"
    else:
        label += f" {shape.__name__}"
        shape = shape(spec, tree)
    stored = getattr(torch, KV_FORMATS[kv].torch_name)
    compute = {"float16": torch.float16}.get(kv, torch.bfloat16)
    arguments = launch.arguments(spec, page, attention_order(SM90, *head), tree)
    arguments |= launch.scratch(ROWS, ROWS, spec.d_v, torch.device("meta"))
    arguments |= {"c": 1.0, "pre": 1.0, "v_scale": 1.0, "sinks2": floats(spec.heads)}
    image = ("positions", "start", "tail_indptr", "tail_slots", "page_ids")
    arguments |= dict.fromkeys(image, ints(page)) | {
        "q": half(ROWS, spec.heads, spec.d_qk, dtype=compute),
        "k": half(page, spec.kv_heads, spec.d_qk, dtype=stored),
        "v": half(page, spec.kv_heads, spec.d_v, dtype=stored),
        "out": half(ROWS, spec.heads, spec.d_v, dtype=compute),
        "lse": floats(ROWS, spec.heads),
        "CAP": cap is not None,
    }
    return label, launch.launch, arguments, ints(ROWS, ITEM), shape


def attentions() -> Iterator[Launch]:
    """Yields attention launches for head sizes, launch shapes and features."""
    shapes = (launch.few, launch.some, launch.many)
    narrow, small, latent = "float8_e4m3", HEADS[:2], HEADS[4]
    yield from (attend(head, shape) for head, shape in product(HEADS, shapes))
    yield from (attend(head, shape, tree=True) for head, shape in product(HEADS, shapes[:2]))
    yield from (attend(head, shape, cap=30.0) for head, shape in product(HEADS[1:3], shapes))
    yield from (attend(head, shape, narrow) for head, shape in product(small, shapes[1:]))
    yield attend(latent, launch.some, narrow)
    yield from (attend((128, 128), shape, "float16") for shape in shapes)
    for page in (16, 32, 64, 128):
        for head, shape in product(small, (launch.PREFILL, launch.DECODE)):
            yield attend(head, shape, page=page)
    yield from (attend(latent, launch.LATENT, page=page) for page in (16, 32, 64))


def gemms() -> Iterator[Launch]:
    """Yields GEMMs for every tile chosen for the shapes in GEMMS, and MLA's batched GEMMs."""
    for n, k in GEMMS:
        operands = (half(ROWS, k), half(n, k), half(ROWS, n))
        for tile in dict.fromkeys(tile_for(n, k, rows) for rows in GRID):
            yield f"{n}x{k} {tile.name}", gemm, *operands, tile
    for (n, k), tile in product(((512, 128), (128, 512)), (FEW, MANY)):
        operands = (half(ROWS, 128, k), half(128, n, k), half(ROWS, 128, n))
        yield f"128 x {n}x{k} {tile.rows}", gemm, *operands, tile


def rows() -> Iterator[Launch]:
    """Yields row operations, the sampler, cache writes (8 heads of 128, a latent row) and moves."""
    for n in (4096, 2880):
        x, weight = half(ROWS, n), floats(n)
        yield f"{n}", rowwise.rms_norm, x, weight, 1e-6
        yield f"{n} add", rowwise.add_rms_norm, x, x, weight, 1e-6
        yield f"{n} layer", rowwise.layer_norm, x, weight, weight, 1e-6
    yield "4096", rowwise.pool, half(ROWS, 4096), [(0, 2), (2, 3)]
    cos_sin = CosSin(floats(ROWS, 64), floats(ROWS, 64))
    yield "128", rowwise.rope_cos_sin, ints(ROWS), floats(64), 1.0
    x, heads = half(ROWS, 6144), Heads(heads=32, kv_heads=8, d=128, eps=1e-6)
    yield "128", rowwise.qk_norm_rope, x, heads, None, cos_sin
    yield "128 norm", rowwise.qk_norm_rope, x, heads, floats(2, 128), cos_sin
    for act in ("silu", "gelu", "gelu_tanh"):
        yield act, rowwise.act_and_mul, half(ROWS, 24576), act
    yield "clamped", rowwise.clamped_swiglu, half(ROWS, 24576), 1.702, 7.0
    yield "bias", rowwise.add_bias, x, half(6144)
    logits, numbers = half(ROWS, 151936), floats(ROWS, 3, dtype=torch.float64)
    yield "sample", sample.sample_tokens, logits, numbers, longs(ROWS, 5), True
    yield "logprobs", sample.compute_logprobs, floats(ROWS, 151936), longs(ROWS), 5
    for kv, (kv_heads, d) in product(("bfloat16", "float8_e4m3"), ((8, 128), (1, 576))):
        storage = half(ROWS, kv_heads, d, dtype=getattr(torch, KV_FORMATS[kv].torch_name))
        yield f"{kv_heads}x{d} {kv}", cache.write, storage, ints(ROWS), half(storage.shape), 1.0
    for count in (16, 256, 4096):
        yield f"{count} rows", cache.move, [half(ROWS, 8, 128)], ints(count, 2)


def experts() -> Iterator[Launch]:
    """Yields a mixture of experts: 8 of 128, hidden 2048, inner 768; and a choice among groups."""
    for count in (ROWS, 256):
        yield f"{count} rows", moe.router, half(count, 2048), floats(128, 2048)
    few, many = Routing(8, 128, norm=True), Routing(8, 256, "sigmoid", True, groups=8, keep=4)
    yield "8 of 128", moe.route, floats(ROWS, 128), few, None
    yield "8 of 256 bias", moe.route, floats(ROWS, 256), many, floats(256)
    routes = moe.Routes(ints(ROWS, 8), floats(ROWS, 8), ints(128), ints(8 * ROWS))
    for (count, n, k), tile in product(((ROWS, 1536, 2048), (8 * ROWS, 2048, 768)), (FEW, MANY)):
        operands = (half(count, k), half(128, n, k), None, routes, tile)
        yield f"{n}x{k} {tile.rows}", moe.grouped_gemm, *operands
    yield "8", moe.combine, half(8 * ROWS, 2048), routes


# ---- costs ----


def build(variant: str) -> Any:
    """Compiles a variant and returns the kernel."""
    module, name = json.loads(variant)["name"].rsplit(".", 1)
    with offline(None):
        return getattr(importlib.import_module(module), name).preload(variant)


def inspect(variant: str) -> dict[str, int]:
    """Returns a variant's registers, stack, spills in loops, shared memory and MMA instructions."""
    kernel = build(variant)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        rule = "cuobjdump prints registers and stack"
        raise RuleError(rule, text[-200:], "Use the Triton version of constraints.txt")
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "loop_spills": loop_spills(text),
        "shared_bytes": int(kernel.metadata.shared),
        "wgmma": len(re.findall(r"\bHGMMA\b", text)),
        "mma": len(re.findall(r"\bHMMA\b", text)),
    }


def loop_spills(sass: str) -> int:
    """Counts loads and stores of local memory in innermost loops with a matrix instruction."""
    code = re.findall(r"^\s+/\*[0-9a-f]{4,5}\*/\s+(.*?);", sass, re.M)  # 16 bytes each
    loops = []
    for end, text in enumerate(code):
        back = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        # not a loop: a barrier wait's retry is at the end of the code and jumps back
        if back is None or "SYNCS.PHASECHK" in " ".join(code[max(end - 3, 0) : end]):
            continue
        body = range(int(back[1], 16) // 16, end + 1)
        if any(re.search(r"\bHG?MMA\b", code[at]) for at in body):
            loops.append(set(body))
    inner = [body for body in loops if not any(other < body for other in loops)]
    hot = {at for body in inner for at in body}
    return sum(re.search(r"\b(LDL|STL)\b", code[at]) is not None for at in hot)
