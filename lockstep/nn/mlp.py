"""Feed-forward layers: plain, gated, and mixtures of experts. A mixture has a router in float32 and
all experts of a layer as one stacked weight for a grouped GEMM; a row adds its experts' results in
its own order. Nothing is read back. A config's activation is an operation of the device."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.nn.layers import Affine, Linear, WeightSource, stack
from lockstep.ops import Activation, Ops, Packed, Routing
from lockstep.types import check_one_of

Gate = Callable[[Tensor], Tensor]  # an operation of the device, with its constants
ACTIVATIONS = {
    "silu": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def activation(name: str) -> Activation:
    check_one_of(ACTIVATIONS, "an activation", name, "Use a model with one of these")
    return ACTIVATIONS[name]


class ClampedGlu(NamedTuple):
    """The constants that `Ops.clamped_swiglu` takes."""

    alpha: float
    limit: float


@dataclass(frozen=True, eq=False)
class Mlp:
    """down(act(up(x))). If `act` has a gate, `up` computes gate and up, concatenated."""

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
        """Returns gate and up as one weight, and their bias, not packed."""
        return w.affine({"gate_proj": self.inner, "up_proj": self.inner}, self.hidden, self.bias)

    def ungated(self, w: WeightSource, up: str, down: str) -> Mlp:
        """Builds two layers of these names, without a gate."""
        first = w.linear(up, self.inner, self.hidden, self.bias)
        second = w.linear(down, self.hidden, self.inner, self.bias)
        return Mlp(first, second, partial(w.ops.activate, act=activation(self.act)))

    def build(self, w: WeightSource) -> Mlp:
        up = Linear(w.pack(*self.gate_up(w)), w.ops)
        down = w.linear("down_proj", self.hidden, self.inner, self.bias)
        return Mlp(up, down, partial(w.ops.act_and_mul, act=activation(self.act)))


# all experts of a layer: up [e, 2 inner, hidden], gate first, and down [e, hidden, inner]
Experts = tuple[Affine, Affine]
Load = Callable[[WeightSource, int, MlpSpec], Experts]


@dataclass(frozen=True, eq=False)
class Moe:
    """Routed experts, and a shared expert that every row uses, if the model has one."""

    router: Linear
    correction: Tensor | None
    routing: Routing
    up: Packed
    down: Packed
    act: Gate
    shared: Mlp | None
    ops: Ops

    def __call__(self, x: Tensor) -> Tensor:
        ops = self.ops
        routes = ops.route(self.router(x.float()), self.routing, self.correction)
        hidden = ops.grouped_linear(ops.dispatch(x, routes), self.up, routes)
        parts = ops.grouped_linear(self.act(hidden), self.down, routes)
        out = ops.combine(parts, routes)
        return out if self.shared is None else out + self.shared(x)


@dataclass(frozen=True)
class MoeSpec:
    """The experts, how they are chosen, the router's name. `shared`: an expert for all rows."""

    routing: Routing
    expert: MlpSpec
    router: str = "gate"
    router_bias: bool = False
    correction: bool = False
    shared: MlpSpec | None = None
    gate: ClampedGlu | None = None  # if not the expert's activation
    load: Load | None = None  # reads the experts of a model that does not store them one by one

    def build(self, w: WeightSource) -> Moe:
        n, expert = self.routing.experts, self.expert
        weight, bias = w.affine({self.router: n}, expert.hidden, self.router_bias)
        name = f"{self.router}.e_score_correction_bias"
        correction = w.tensor(name, n) if self.correction else None
        up, down = (self.load or one_by_one)(w.at("experts"), n, expert)
        if self.gate is None:
            act = partial(w.ops.act_and_mul, act=activation(expert.act))
        else:
            act = partial(w.ops.clamped_swiglu, **self.gate._asdict())
        return Moe(
            router=Linear(w.pack(weight, bias, torch.float32), w.ops),
            correction=correction,
            routing=self.routing,
            up=w.pack(*up),
            down=w.pack(*down),
            act=act,
            shared=self.shared.build(w.at("shared_experts")) if self.shared else None,
            ops=w.ops,
        )


def one_by_one(w: WeightSource, n: int, expert: MlpSpec) -> Experts:
    """Reads experts that the files hold as layers of their own, without biases."""
    ups, downs = [], []
    for part in map(w.at, range(n)):
        downs.append(part.tensor("down_proj.weight", expert.hidden, expert.inner))
        ups.append(expert.gate_up(part)[0])
    return (stack(ups), None), (stack(downs), None)
