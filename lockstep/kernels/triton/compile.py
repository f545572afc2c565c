"""Compiles kernel variants for sm_90 without a GPU and reads off registers, spills and shared
memory; results are kept by the digest of all kernel texts. Called by `lockstep kernels --compile`
and CI."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.types import RuleError

if TYPE_CHECKING:
    from lockstep.kernels.triton.variants import Variant  # which needs Triton

SHARED_LIMIT = 227 * 1024
FOLDER = "LOCKSTEP_TRITON_REPORTS"  # where results are kept, if not in the user's cache


@dataclass(frozen=True)
class Report:
    """What one variant costs. `loop_spills`: accesses to local memory inside loops that multiply
    matrices."""

    name: str
    registers: int
    stack_bytes: int
    loop_spills: int
    shared_bytes: int
    wgmma: int
    mma: int
    seconds: float
    known_spills: int = 0

    @property
    def fault(self) -> str | None:
        """What is wrong with it, or None."""
        if self.loop_spills > self.known_spills:
            return f"{self.loop_spills} accesses to spilled registers in a hot loop"
        if self.shared_bytes > SHARED_LIMIT:
            return f"{self.shared_bytes} bytes of shared memory; at most {SHARED_LIMIT}"
        return None


def folder() -> Path:
    """Where results are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(FOLDER) or Path(base, "lockstep", "triton"))


def digest(variant: Variant) -> str:
    """Of everything a binary depends on."""
    import triton

    texts = [
        path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))
    ]
    key = json.dumps([texts, triton.__version__, asdict(variant)], sort_keys=True, default=str)
    return hashlib.sha256(key.encode()).hexdigest()[:24]


def compile_all(chosen: Sequence[Variant], jobs: int) -> Iterator[tuple[Report, bool]]:
    """Reports as they come, and whether each was there already."""
    missing = []
    for variant in chosen:
        kept = folder() / f"{digest(variant)}.json"
        if kept.exists():
            yield Report(**json.loads(kept.read_text())), True
        else:
            missing.append(variant)
    if jobs <= 1 or len(missing) <= 1:
        yield from ((compile_one(variant.name), False) for variant in missing)
        return
    with ProcessPoolExecutor(min(jobs, len(missing)), mp_context=get_context("spawn")) as pool:
        for done in as_completed([pool.submit(compile_one, variant.name) for variant in missing]):
            yield done.result(), False


def compile_one(name: str) -> Report:
    """Compiles the variant called `name` and keeps its report."""
    from lockstep.kernels.triton.variants import variants

    variant = next(v for v in variants() if v.name == name)
    begin = time.perf_counter()
    kernel = build(variant)
    seconds = round(time.perf_counter() - begin, 2)
    report = Report(
        name=name, **inspect(kernel), seconds=seconds, known_spills=variant.known_spills
    )
    folder().mkdir(parents=True, exist_ok=True)
    (folder() / f"{digest(variant)}.json").write_text(json.dumps(asdict(report)))
    return report


def build(variant: Variant) -> Any:
    """The compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    module, _, function = variant.kernel.partition(":")
    kernel = getattr(importlib.import_module(f"lockstep.kernels.triton.{module}"), function)
    names = kernel.arg_names
    types = {
        n: "constexpr" if n in variant.constants else variant.types.get(n, "i32") for n in names
    }
    constants = {(names.index(n),): value for n, value in variant.constants.items()}
    aligned = {
        (i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if types[n].startswith("*")
    }
    source = (GluonASTSource if variant.gluon else ASTSource)(kernel, types, constants, aligned)
    options = {
        "num_warps": variant.warps,
        "num_stages": variant.stages,
        "maxnreg": variant.registers,
        "enable_fp_fusion": False,
    }
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)


def inspect(kernel: Any) -> dict[str, int]:
    """Registers, stack, spills in hot loops, shared memory and matrix instructions of a compiled
    kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.TemporaryDirectory() as place:
        cubin = Path(place, "kernel.cubin")
        cubin.write_bytes(kernel.asm["cubin"])
        usage, sass = (
            subprocess.run([tool, option, cubin], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        rule = "cuobjdump tells registers and stack"
        raise RuleError(rule, usage[-200:], "Use the Triton version of constraints.txt")
    return {
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "loop_spills": loop_spills(sass),
        "shared_bytes": int(kernel.metadata.shared),
        "wgmma": len(re.findall(r"\bHGMMA\b", sass)),
        "mma": len(re.findall(r"\bHMMA\b", sass)),
    }


def loop_spills(sass: str) -> int:
    """Loads and stores of local memory inside innermost loops that hold a matrix instruction."""
    code = [
        (int(at, 16), text)
        for at, text in re.findall(r"^\s+/\*([0-9a-f]{4,5})\*/\s+(.*?);", sass, re.M)
    ]
    products = [at for at, text in code if re.search(r"\bHG?MMA\b", text)]
    loops = []
    for i, (end, text) in enumerate(code):
        back = re.search(r"\bBRA\b.*?0x([0-9a-f]+)", text)
        # a wait that was not over at once is repeated at the end of the code, and jumps back
        retried = any("SYNCS.PHASECHK" in before for _, before in code[max(i - 3, 0) : i])
        begin = int(back[1], 16) if back and not retried else end
        if begin < end and any(begin <= at <= end for at in products):
            loops.append((begin, end))
    inner = [
        (a, b)
        for a, b in loops
        if not any((c, d) != (a, b) and a <= c and d <= b for c, d in loops)
    ]
    local = [at for at, text in code if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(a <= at <= b for a, b in inner) for at in local)


def run(args: Any) -> int:
    """`lockstep kernels --compile sm_90`."""
    try:
        import triton

        from lockstep.kernels.triton.variants import variants
    except ImportError as error:
        rule = "compiling GPU kernels needs Triton"
        raise RuleError(rule, str(error), "pip install triton==3.6.0 (Linux)") from None
    chosen = [v for v in variants() if not args.only or any(text in v.name for text in args.only)]
    if not chosen:
        rule = "--only names kernel variants"
        raise RuleError(rule, repr(args.only), "See `lockstep kernels --list`")
    if args.list or args.compile is None:
        print("\n".join(v.name for v in chosen))
        return 0
    about = f"{len(chosen)} variants for {args.compile}, Triton {triton.__version__}"
    print(f"{about}, {args.jobs} processes", flush=True)
    titles = ("registers", "stack", "spills", "shared", "wgmma", "mma", "seconds")
    print(f"{'variant':<40}", " ".join(f"{title:>9}" for title in titles))
    reports, begin = [], time.perf_counter()
    for report, kept in compile_all(chosen, args.jobs):
        reports.append(report)
        seconds = "kept" if kept else f"{report.seconds:.1f}"
        cells = (report.registers, report.stack_bytes, report.loop_spills, report.shared_bytes,
                 report.wgmma, report.mma, seconds)  # fmt: skip
        row = " ".join(f"{cell:>9}" for cell in cells)
        print(f"{report.name:<40} {row} {report.fault or ''}".rstrip(), flush=True)
    faults = [report for report in reports if report.fault]
    took = time.perf_counter() - begin
    print(f"{len(reports)} variants in {took:.0f} s, {len(faults)} with a fault")
    if args.json:
        Path(args.json).write_text(json.dumps([asdict(report) for report in reports], indent=1))
    return 1 if faults else 0
