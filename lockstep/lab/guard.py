"""What both harnesses are built on. A `Judgement` collects what was checked in a cell, by property.
`Guarded` hands out every buffer that a backend may touch between bands of canaries, with NaN in
unwritten memory: a write before or after a buffer, or into an input, is found as damage."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from lockstep.kv.pool import Pool
from lockstep.kv.tables import PagePool
from lockstep.lab import table
from lockstep.lab.options import CPU, Device
from lockstep.plan.step import Ints
from lockstep.types import PlanError

BAND = 64  # elements on either side of a buffer
CANARY = {1: 0x7F, 2: 0x7FC1, 4: 0x7FC0BEEF}  # read as floats NaN, read as indices far out of range
PROPERTY_TEXTS = table("properties.toml")


@dataclass(frozen=True)
class Finding:
    """One property of one cell: whether it held; `detail` says where not, or what was checked."""

    name: str
    held: bool
    detail: str
    rule: str = ""  # the rule of `plan.check` that a plan broke


@dataclass
class Judgement:
    """The findings of a cell by property, its measured errors, and counters of what happened."""

    faults: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)
    out_error: float = 0.0
    lse_error: float = 0.0
    tolerance_used: float = 0.0  # largest error as a fraction of what is allowed
    counters: Counter[str] = field(default_factory=Counter)
    rule: str = ""  # the first rule of `plan.check` that a plan broke

    def note(self, name: str, faults: Iterable[str], held: str = "") -> None:
        """Records a check: `faults` violate the property, `held` is shown if there are none."""
        self.faults.setdefault(name, []).extend(faults)
        self.held[name] = held or self.held.get(name) or PROPERTY_TEXTS.get(name, "")

    def check(self, name: str, holds: bool, fault: str, held: str = "") -> None:
        """Records one check of a property: `fault` says what is wrong if `holds` is false."""
        self.note(name, [] if holds else [fault], held)

    def note_error(self, error: Exception) -> None:
        """Records what the code under test raised: by the plan's own check, or anything else."""
        name = "raised"
        if isinstance(error, PlanError):
            name, self.rule = "plan", self.rule or error.rule
        self.note(name, [f"{type(error).__name__}: {error}"])

    def require(self, names: Iterable[str]) -> None:
        """Checks that these counters are above 0: what the recipe is about really happened."""
        missed = [f"{name} is 0" for name in names if not self.counters[name]]
        self.note("paths", missed, ", ".join(names))

    def fault_lines(self) -> list[str]:
        """Returns every fault, as "property: fault"."""
        return [f"{name}: {fault}" for name, faults in self.faults.items() for fault in faults]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """One finding per property; that of a raised exception is last."""
        found = []
        for name in sorted(self.faults, key=lambda name: name == "raised"):
            faults = "; ".join(self.faults[name][:3])
            rule = self.rule if name == "plan" else ""
            found.append(Finding(name, not faults, faults or self.held[name], rule))
        return tuple(found)


class Guarded:
    """Replaces an arena; hands out tensors between guard bands and detects forbidden changes."""

    def __init__(self, device: Device = CPU) -> None:
        self.device = device.place
        # fault, live bits, their copy, and whether they are checked after later steps, too
        self._kept: list[tuple[str, Tensor, Tensor, bool]] = []
        self.image: Ints = np.zeros(0, np.int32)  # the last step's, on the host
        self.images: dict[int, Tensor] = {}  # by length: one address each, as in an arena

    def storage(
        self, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Returns a cache storage full of poison, between canaries."""
        return self._between(math.prod(shape), dtype, "storage", True).view(dtype).view(shape)

    def rows(self, values: Tensor) -> Tensor:
        bits = self._between(values.numel(), values.dtype, "input", False)
        out = bits.view(values.dtype).view(values.shape)
        out.copy_(values)
        self._keep("the input was changed", bits, False)
        return out

    def host(self, length: int) -> Ints:
        """Replaces `Arena.host`: returns canaries, which the step overwrites with its image."""
        self.image = np.full(length, CANARY[4], np.int32)
        return self.image

    def load(self, length: int) -> Tensor:
        """Copies the image to the device and returns it there."""
        if length not in self.images:
            self.images[length] = self._between(length, torch.int32, "plan image", True)
        bits = self.images[length]
        bits.copy_(torch.from_numpy(self.image.copy()))
        self._keep("the plan image was changed", bits, False)
        return bits

    def damage(self) -> list[str]:
        """Returns forbidden writes, then forgets the inputs and images that it has checked."""
        found = [fault for fault, now, was, _ in self._kept if not torch.equal(now, was)]
        self._kept = [kept for kept in self._kept if kept[-1]]
        return found

    def _between(self, count: int, dtype: torch.dtype, name: str, lasting: bool) -> Tensor:
        canary, size = CANARY[dtype.itemsize], (count + 2 * BAND,)
        buffer = torch.full(size, canary, dtype=_int(dtype), device=self.device)
        for band in (buffer[:BAND], buffer[BAND + count :]):
            self._keep(f"the band around the {name} was written", band, lasting)
        return buffer[BAND : BAND + count]

    def _keep(self, fault: str, bits: Tensor, lasting: bool) -> None:
        self._kept.append((fault, bits, bits.clone(), lasting))


def _int(dtype: torch.dtype) -> torch.dtype:
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]


def as_bits(t: Tensor) -> Tensor:
    """Returns a tensor's memory as integers: NaN equals itself, -0 does not equal 0."""
    return t.contiguous().view(_int(t.dtype))


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(as_bits(a), as_bits(b)))


def poison(pool: Pool, pages: Sequence[int]) -> None:
    """Fills these pages with NaN: they hold no keys any more."""
    for storage in (storage for layer in pool.storages for storage in layer):
        bits = storage.view(_int(storage.dtype))
        bits = bits.view(-1, pool.spec.page_size, *bits.shape[1:])
        bits[list(pages)] = CANARY[storage.element_size()]


def shuffle(pools: Iterable[PagePool | None], seed: int) -> None:
    """Shuffles each pool's free pages, so that pages are handed out in any order."""
    for g, pool in enumerate(pools):
        if pool is not None:
            np.random.default_rng(seed + 17 * g).shuffle(pool._free)
