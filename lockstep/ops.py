"""What a device computes: one table of operations, `Ops`. A device is a folder `kernels/<name>/`
with `Ops` in its ops.py, or an entry point of the group `lockstep.devices`.

Rules that every operation keeps. A row of the result depends on its own row of the operands and on
nothing else. Results are new tensors on `device`; nothing is read back to the host and nothing
waits for the device, so that a call can be captured or recorded with its tensors and ints. Operands
may be views: the last dimension is contiguous, others have any stride. A step of no rows is
allowed. t counts rows, "activations" are of `dtype`; weights of norms and all of routing, sampling
and log-probabilities are float32 and wider.

A kernel reads and writes memory behind torch's back. So functions are marked, those of a table by
`kernels.select`, a backend's `attend` by `run.step`: a `Recorder` that is active on this thread is
told of every call. One that is `transparent` it need not take as one.
"""

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as active_modes
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lockstep.types import Choice, RuleError

Given = ParamSpec("Given")
Result = TypeVar("Result")
MARK, TRANSPARENT = "_is_operation", "_is_transparent"
Packed = Any  # a weight as the device wants it: made by `pack`, read by nobody else


class Activation(StrEnum):
    """An elementwise function."""

    SILU = "silu"  # x · sigmoid(x)
    GELU = "gelu"  # x · Φ(x)
    GELU_TANH = "gelu_tanh"  # its approximation by tanh
    RELU = "relu"


class Heads(NamedTuple):
    """Queries and keys of a row: how many heads of each, their columns, the eps of their norms."""

    heads: int
    kv_heads: int
    d: int
    eps: float = 0.0
    interleaved: bool = False  # columns 2i and 2i+1 turn together, otherwise i and i + half


class CosSin(NamedTuple):
    """Of a step's rows: cos and sin float32 [t, half], times the rope's factor."""

    cos: Tensor
    sin: Tensor


class Routes(Protocol):
    """Which experts compute which row: what `route` makes. The rest of it is the device's own."""

    @property
    def ids(self) -> Tensor:
        """Of experts, best first: ids integers [t, k]."""

    @property
    def weights(self) -> Tensor:
        """Of these experts: weights float32 [t, k]."""


@dataclass(frozen=True)
class Routing:
    """From router logits [t, experts] to k experts a row, and their weights."""

    k: int
    experts: int
    # "softmax" over all, "sigmoid" of each, or "chosen": logits rank, a softmax over the k weighs
    score: str = "softmax"
    norm: bool = False  # weights are divided by their sum (plus `floor`)
    floor: float = 0.0
    scale: float = 1.0  # multiplies the weights at last
    groups: int = 1  # equal; one counts by its best expert, with a correction by its best two's sum
    keep: int = 1  # so many of the groups take part, the best ones; 1 of 1 = all

    def __post_init__(self) -> None:
        counts = (self.k, self.experts, self.groups, self.keep)
        enough = self.keep <= self.groups and self.k * self.groups <= self.experts * self.keep
        if min(counts) < 1 or self.experts % self.groups or not enough:
            got = f"k={self.k} of {self.experts} experts, {self.keep} of {self.groups} groups"
            rule = "a router picks some of its experts, from some of their equal groups"
            raise RuleError(rule, got, "Check config.json")


class Ops(Protocol):
    """The operations of one device. `Ops(dtype)` makes a table whose activations are of that dtype,
    one of `dtypes`."""

    dtypes: tuple[str, ...]  # of activations, the device's own choice first
    dtype: torch.dtype  # of activations
    device: torch.device  # where every tensor lies
    machine: str  # the class of machine, for the fingerprint: "cpu-x86_64"
    gemm_order: Choice  # of the sums in a GEMM: its name, for the fingerprint, and why

    # ---- GEMM ----

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Once, at load: weight activations [n, k], bias activations [n] for `linear`, a dimension
        [g] before these for the other two. Float32 where rows and results are to be (a router)."""

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x activations [t, k], or of heads that are k together [t, heads, k / heads], · weightᵀ,
        rounded, then + bias, rounded: returns activations [t, n]. With a float32 weight x and the
        result are float32."""

    def batched_linear(self, x: Tensor, packed: Packed) -> Tensor:
        """y[:, i] = x[:, i] · weight[i]ᵀ of x activations [t, g, k]: y activations [t, g, n]. MLA's
        absorb and expand."""

    def grouped_linear(self, x: Tensor, packed: Packed, routes: Any) -> Tensor:
        """Every pair (row, expert) of `routes` with its expert's weight: x activations [t ·
        k_experts, k] as `dispatch` or an earlier call gave them; returns activations [t ·
        k_experts, n]."""

    # ---- experts ----

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Routes:
        """Who computes what, from logits float32 [t, experts]. Equal scores go to the smaller
        expert id; a correction float32 [experts] steers what is chosen, not what it weighs."""

    def dispatch(self, x: Tensor, routes: Any) -> Tensor:
        """x activations [t, n] as `grouped_linear` takes them: returns activations [t · k_experts,
        n], a row per pair in the device's own order, or x where it finds rows through `routes`."""

    def combine(self, parts: Tensor, routes: Any) -> Tensor:
        """A row's parts times their weights, added in the order of its choice in float32, rounded
        once: parts activations [t · k_experts, n], returns activations [t, n]."""

    # ---- rows ----

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension: x activations [t, n] or [t,
        heads, n], weight float32 [n], y activations [as x]. Float32 inside, rounded once."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """x and residual activations [t, n]: their sum activations [t, n], rounded, and the norm
        activations [t, n] of that; weight float32 [n]. The bits of two calls."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) · weight + bias of x activations [t, n]; weight and bias
        float32 [n]; returns activations [t, n]."""

    def rope_cos_sin(self, positions: Tensor, freqs: Tensor, factor: float) -> CosSin:
        """positions int32 [t], freqs float32 [half]. The angle is their float32 product; cos and
        sin are rounded to float32, then multiplied with the factor."""

    def rope(self, x: Tensor, cos_sin: CosSin, interleaved: bool) -> Tensor:
        """x activations [t, heads, d]: the first 2 · half columns turned, the rest as they are. It
        returns activations [t, heads, d] in the halves layout, whatever x has."""

    def qk_norm_rope(
        self, x: Tensor, heads: Heads, weights: Tensor | None, cos_sin: CosSin
    ) -> tuple[Tensor, Tensor, Tensor]:
        """x activations [t, (heads + 2 kv_heads) · d]: queries, keys, values. Gives q activations
        [t, heads, d] and k activations [t, kv_heads, d], `rms_norm` by weights float32 [2, d], if
        any, then `rope`, bit for bit; and v activations [t, kv_heads, d], a view of x."""

    def activate(self, x: Tensor, act: Activation) -> Tensor:
        """act(x) of x activations [t, n]: returns activations [t, n]."""

    def act_and_mul(self, x: Tensor, act: Activation) -> Tensor:
        """act(gate) · up of x activations [t, 2n], gate then up: returns activations [t, n]. With
        SILU: silu_and_mul."""

    def clamped_swiglu(self, x: Tensor, alpha: float, limit: float) -> Tensor:
        """(up + 1) · gate · sigmoid(alpha · gate) of x activations [t, 2n], gate then up, gate at
        most `limit`, up within ±limit: returns activations [t, n]."""

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        """cap · tanh(x / cap) of x float32 [t, n]: returns float32 [t, n]."""

    def pool(self, x: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """The means over spans [begin, end) of x activations [t, n], brought to length 1 (each by
        its norm), in float64, rounded once: returns float32 [len(spans), n]. Outside of captured
        steps."""

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x[rows] of x activations [n, d] and rows int32 [t], all of them there: returns
        activations [t, d], in memory of its own."""

    def spread_columns(self, x: Tensor, columns: Tensor, size: int) -> Tensor:
        """y[:, columns] = x of x float32 [t, n] and distinct columns int64 [n] below the size:
        returns float32 [t, size], -inf elsewhere."""

    # ---- the cache ----

    def kv_write(self, storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
        """storage[slots] = values / scale in the storage's format, clamped to its range, rounded
        once. storage kv_dtype [slots, kv_heads, columns], slots int32 [t], distinct but for the
        null page's; values activations [t, kv_heads, d], d ≤ columns: zeros behind."""

    def kv_move(self, storages: Sequence[Tensor], moves: Tensor) -> None:
        """In all storages kv_dtype [slots, kv_heads, columns]: rows moves[:, 0] are read, all of
        them, then written to moves[:, 1]; moves int32 [m, 2]."""

    # ---- sampling: formulas in `sample/` ----

    def sample_tokens(
        self, logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool
    ) -> tuple[Tensor, Tensor]:
        """tokens and states int64 [s] of logits activations [s, vocab], or float32; the bits of
        the CPU's, `kernels.cpu.sample`. floats float64 [s, FLOATS] as `params.Numbers` has them;
        ints int64 [s, INTS]: top-k, `formulas.counter`. `cuts`: some row has a top-k or top-p."""

    def compute_logprobs(
        self, logits: Tensor, token_ids: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """From logits float32 [s, vocab] of token_ids int64 [s] (-1: none): chosen float32 [s]; and
        of the k best tokens: top_ids int64 [s, k], top float32 [s, k]. The bits of the CPU's."""


def by_numpy(tensor: Tensor) -> bool:
    """Whether numpy is to copy it. On a CPU torch's threads would look for more work for
    milliseconds afterwards, on processors that our helpers need."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32


def joined(parts: Sequence[Any], dim: int) -> Tensor:
    """One behind the other, tensors or numpy's; by torch while somebody records."""
    if isinstance(parts[0], Tensor):
        if active_modes() or not by_numpy(parts[0]):
            return torch.cat(tuple(parts), dim)
        parts = [each.numpy() for each in parts]
    return torch.from_numpy(np.concatenate(parts, dim))


def copied(source: Tensor, target: Tensor) -> None:
    """From one to the other."""
    if by_numpy(target):
        target.numpy()[:] = source.numpy()
    else:
        target.copy_(source)


def sent(values: Tensor, device: torch.device) -> Tensor:
    """What the host has, on a device: from pinned memory nothing waits."""
    if device.type == "cpu":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values).to(device, non_blocking=True)


# ---- operations: calls that a recorder takes as one ----


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch does on this thread, and every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler, which takes seconds, to keep it away from `cls`."""
        return False

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carries out an operation."""


def operation(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, of whose calls a recorder is told."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        recorder: Any = active_modes() and _get_current_dispatch_mode()
        if isinstance(recorder, Recorder):
            result: Result = recorder.call(function, *args, **kwargs)
            return result
        return function(*args, **kwargs)

    setattr(called, MARK, True)
    return called


def transparent(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, of which a recorder sees all: it consists of compiled kernels that are noted
    one by one (`kernels.cpu.threads`), of views, and of what torch does."""
    setattr(function, TRANSPARENT, True)
    return function


NAMES = [n for n, f in vars(Ops).items() if inspect.isfunction(f) and not n.startswith("_")]


def marked(table: Ops) -> Ops:
    """The table with every function an operation."""
    for name in NAMES:
        setattr(table, name, operation(getattr(table, name)))
    return table


def unmarked(table: Ops) -> list[str]:
    """The functions of a table that a recorder would not be told of."""
    return [name for name in NAMES if not hasattr(getattr(table, name), MARK)]
