"""How cells are run: the device and dtype, with or without the plan's checks, in full or quickly.
The commands make one value of these, and everything that plays a cell receives it."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from lockstep.kernels.select import select
from lockstep.ops import Ops, mark_operations
from lockstep.types import GroupSpec, Layout


@dataclass(frozen=True)
class Device:
    """Where something is computed, and the dtype of its activations."""

    name: str = "cpu"
    dtype: str = "float32"

    @staticmethod
    def of(name: str, dtype: str | None = None) -> "Device":
        """Returns the device called `name`, by default with its own dtype."""
        ops, _ = select(name, dtype or "auto")
        return Device(name, str(ops.dtype).removeprefix("torch."))

    @property
    def ops(self) -> Ops:
        """A new table of operations, with whatever a test or a revert has put into its class."""
        return mark_operations(_table(self.name, self.dtype)(self.dtype))

    @property
    def place(self) -> torch.device:
        return self.ops.device

    @property
    def compute(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, self.dtype)
        return found

    @property
    def unit(self) -> float:
        """The largest relative error of one rounding to the compute dtype: 2^-24 for float32."""
        return torch.finfo(self.compute).eps / 2

    @property
    def flags(self) -> str:
        """The command-line flags that select this device."""
        return "" if self == CPU else f" --device {self.name} --dtype {self.dtype}"

    def specs(self, groups: tuple[GroupSpec, ...]) -> tuple[GroupSpec, ...]:
        """Returns the groups for this device: float32 caches take the dtype of activations."""
        own = {g for g in groups if g.layout is not Layout.FRESH and g.kv_dtype == "float32"}
        return tuple(replace(g, kv_dtype=self.dtype) if g in own else g for g in groups)


@lru_cache
def _table(name: str, dtype: str) -> type[Any]:
    """Returns the class of a device's table; entry points are read once."""
    return type(select(name, dtype)[0])


CPU = Device()


@dataclass(frozen=True)
class RunOptions:
    """Options of a run of cells. Without `checks`, plans are not checked before they run."""

    device: Device = CPU
    checks: bool = True
    quick: bool = False


FULL = RunOptions()
