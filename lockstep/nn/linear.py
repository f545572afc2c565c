"""The linear layer: y = x Wᵀ + b by one operation for all row counts, its weight packed at load."""

from dataclasses import dataclass

from torch import Tensor

from lockstep.ops import Ops, Packed


@dataclass(frozen=True, eq=False)
class Linear:
    """x [t, k] → [t, n]. The bias is added after the product is rounded."""

    packed: Packed
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.ops.linear(x, self.packed)
