"""The feed-forward layer and its gates: which operation of the device a config's activation is."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import Tensor

from lockstep.nn.linear import Linear
from lockstep.nn.source import Affine, WeightSource
from lockstep.ops import Activation
from lockstep.types import RuleError

Gate = Callable[[Tensor], Tensor]  # an operation of the device, with its constants
ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def activation(name: str) -> Activation:
    if name not in ACTIVATIONS:
        rule = f"an activation is one of {', '.join(ACTIVATIONS)}"
        raise RuleError(rule, repr(name), "Use a model with one of these")
    return ACTIVATIONS[name]


class ClampedGlu(NamedTuple):
    """What `Ops.clamped_swiglu` takes besides the rows."""

    alpha: float
    limit: float


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))). Where `act` has a gate, `up` holds gate and up behind one another."""

    up: Linear
    down: Linear
    act: Gate

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


@dataclass(frozen=True)
class MlpSpec:
    """A gated feed-forward layer: gate_proj, up_proj, down_proj."""

    hidden: int
    inner: int
    act: str
    bias: bool = False

    def gate_up(self, w: WeightSource) -> Affine:
        """Gate and up as one weight, and their bias, unpacked."""
        return w.affine({"gate_proj": self.inner, "up_proj": self.inner}, self.hidden, self.bias)

    def ungated(self, w: WeightSource, up: str, down: str) -> Mlp:
        """Two layers of these names, without a gate."""
        first = w.linear(up, self.inner, self.hidden, self.bias)
        second = w.linear(down, self.hidden, self.inner, self.bias)
        return Mlp(first, second, partial(w.ops.activate, act=activation(self.act)))

    def build(self, w: WeightSource) -> Mlp:
        up = Linear(w.pack(*self.gate_up(w)), w.ops)
        down = w.linear("down_proj", self.hidden, self.inner, self.bias)
        return Mlp(up, down, partial(w.ops.act_and_mul, act=activation(self.act)))
