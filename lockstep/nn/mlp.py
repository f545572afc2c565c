"""The feed-forward layer and its gates: which operation of the device a config's activation is."""

from dataclasses import dataclass

from torch import Tensor

from lockstep.nn.linear import Linear
from lockstep.nn.source import Affine, WeightSource
from lockstep.ops import Activation, Ops
from lockstep.types import RuleError

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


@dataclass(frozen=True)
class Elementwise:
    """act(x), without a gate."""

    act: Activation

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.activate(x, self.act)


@dataclass(frozen=True)
class Glu:
    """act(gate) · up of [T, gate then up]."""

    act: Activation

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.act_and_mul(x, self.act)


@dataclass(frozen=True)
class ClampedGlu:
    """(up + 1) · gate · sigmoid(alpha · gate), clamped to ±limit, gate from above only."""

    alpha: float
    limit: float

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return ops.clamped_swiglu(x, self.alpha, self.limit)


Gate = Elementwise | Glu | ClampedGlu


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))). Where `act` is a Glu, `up` holds gate and up behind one another."""

    up: Linear
    down: Linear
    act: Gate
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x), self.ops))


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
        return Mlp(first, second, Elementwise(activation(self.act)), w.ops)

    def build(self, w: WeightSource) -> Mlp:
        up = Linear(w.pack(*self.gate_up(w)), w.ops)
        down = w.linear("down_proj", self.hidden, self.inner, self.bias)
        return Mlp(up, down, Glu(activation(self.act)), w.ops)
