"""What a device computes: one table of operations, `Ops`. A device is a folder `kernels/<name>/`
with `Ops` in its ops.py, or an entry point of the group `lockstep.devices`.

Rules for every operation. A row of the result depends on its own row of the operands and on nothing
else. Results are new tensors on `device`; nothing is read back to the host and nothing waits for
the device, so that a call can be captured or recorded with its tensors and ints. Operands may be
views: the last dimension is contiguous, others have any stride. A step of no rows is allowed. t
counts rows, "activations" are of `dtype`; weights of norms and all of routing, sampling and
log-probabilities are float32 or wider.

A kernel reads and writes memory without torch seeing it. So functions are marked, those of a table
by `kernels.select`, a backend's `attend` by `run.step`: a `Recorder` that is active on this thread
receives every call. It may record the parts of a `transparent` one instead."""

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
Packed = Any  # a weight in the device's own format: made by `pack`, read by its GEMMs alone


class Activation(StrEnum):
    """An elementwise function."""

    SILU = "silu"  # x · sigmoid(x)
    GELU = "gelu"  # x · Φ(x)
    GELU_TANH = "gelu_tanh"  # its approximation by tanh
    RELU = "relu"


class Heads(NamedTuple):
    """A row's query and key heads: how many, their columns, and the eps of their norms."""

    heads: int
    kv_heads: int
    d: int
    eps: float = 0.0
    interleaved: bool = False  # columns 2i and 2i+1 rotate together, otherwise i and i + half


class CosSin(NamedTuple):
    """The rotation of a step's rows: cos and sin float32 [t, half], times the rope's factor."""

    cos: Tensor
    sin: Tensor


class Routes(Protocol):
    """Which experts compute which row, as `route` returns it. Further fields are the device's."""

    @property
    def ids(self) -> Tensor:
        """The experts of each row, best first: ids integers [t, k]."""

    @property
    def weights(self) -> Tensor:
        """The weights of these experts' results: weights float32 [t, k]."""


@dataclass(frozen=True)
class Routing:
    """How a row's k experts, and their weights, follow from router logits [t, experts]."""

    k: int
    experts: int
    # "softmax" over all, "sigmoid" of each, or "chosen": ranked by logit, softmax over these k
    score: str = "softmax"
    norm: bool = False  # weights are divided by their sum (plus `floor`)
    floor: float = 0.0
    scale: float = 1.0  # multiplies the weights, last of all
    groups: int = 1  # equal; ranked by their best expert, with a correction by their best two's sum
    keep: int = 1  # how many of the groups take part, best first; 1 of 1 = all

    def __post_init__(self) -> None:
        counts = (self.k, self.experts, self.groups, self.keep)
        enough = self.keep <= self.groups and self.k * self.groups <= self.experts * self.keep
        if min(counts) < 1 or self.experts % self.groups or not enough:
            got = f"k={self.k} of {self.experts} experts, {self.keep} of {self.groups} groups"
            rule = "a router's experts form equal groups, and k experts fit into the kept ones"
            raise RuleError(rule, got, "Check config.json")


class Ops(Protocol):
    """A device's operations. `Ops(dtype)` makes a table for activations of one of `dtypes`."""

    dtypes: tuple[str, ...]  # of activations, the device's default first
    dtype: torch.dtype  # of activations
    device: torch.device  # of every tensor
    machine: str  # the class of machine, for the fingerprint: "cpu-x86_64"
    gemm_order: Choice  # of the sums in a GEMM: its name, for the fingerprint, and the reason

    # ---- GEMM ----

    def pack(self, weight: Tensor, bias: Tensor | None) -> Packed:
        """Prepares a weight, at load: weight activations [n, k], bias activations [n] for `linear`,
        with a leading dimension [g] for the others; float32 if rows and results are (a router)."""

    def linear(self, x: Tensor, packed: Packed) -> Tensor:
        """x · weightᵀ, rounded, then + bias, rounded: x activations [t, k], or per head [t, heads,
        k / heads]; returns activations [t, n]. With a float32 weight x and result are float32."""

    def batched_linear(self, x: Tensor, packed: Packed) -> Tensor:
        """y[:, i] = x[:, i] · weight[i]ᵀ of x activations [t, g, k]: y activations [t, g, n]. For
        MLA's absorb and expand."""

    def grouped_linear(self, x: Tensor, packed: Packed, routes: Any) -> Tensor:
        """Multiplies every pair (row, expert) of `routes` by its expert's weight: x activations [t
        · k_experts, k] of `dispatch` or an earlier call; returns activations [t · k_experts, n]."""

    # ---- experts ----

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Routes:
        """Chooses each row's experts from logits float32 [t, experts]. Of equal scores the smaller
        expert id wins; a correction float32 [experts] changes the choice, not the weights."""

    def dispatch(self, x: Tensor, routes: Any) -> Tensor:
        """Arranges x activations [t, n] for `grouped_linear`: returns activations [t · k_experts,
        n], a row per pair in the device's own order, or x if rows are found through `routes`."""

    def combine(self, parts: Tensor, routes: Any) -> Tensor:
        """Adds a row's parts times their weights, in float32 and the order of `routes.ids`, rounded
        once: parts activations [t · k_experts, n], returns activations [t, n]."""

    # ---- rows ----

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) · weight over the last dimension: x activations [t, n] or [t,
        heads, n], weight float32 [n], y activations [as x]. Float32 inside, rounded once."""

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Adds x and residual activations [t, n]: returns their sum activations [t, n], rounded,
        and its norm activations [t, n]; weight float32 [n]. The same bits as two calls."""

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) · weight + bias of x activations [t, n]; weight and bias
        float32 [n]; returns activations [t, n]."""

    def rope_cos_sin(self, positions: Tensor, freqs: Tensor, factor: float) -> CosSin:
        """positions int32 [t], freqs float32 [half]. The angle is their float32 product; cos and
        sin are rounded to float32, then multiplied by the factor."""

    def rope(self, x: Tensor, cos_sin: CosSin, interleaved: bool) -> Tensor:
        """Rotates the first 2 · half columns of x activations [t, heads, d], and keeps the rest. It
        returns activations [t, heads, d] in the halves layout, even if x is interleaved."""

    def qk_norm_rope(
        self, x: Tensor, heads: Heads, weights: Tensor | None, cos_sin: CosSin
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Splits x activations [t, (heads + 2 kv_heads) · d] into queries, keys, values. Returns q
        activations [t, heads, d] and k activations [t, kv_heads, d] after `rms_norm` by weights
        float32 [2, d], if any, and `rope`, bit for bit; v activations [t, kv_heads, d], a view."""

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
        """Averages x activations [t, n] over each span [begin, end) and divides the mean by its
        norm, in float64, rounded once: returns float32 [len(spans), n]. Never captured."""

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        """x[rows] of x activations [n, d] and rows int32 [t], all of them below n: returns
        activations [t, d], in new memory."""

    def spread_columns(self, x: Tensor, columns: Tensor, size: int) -> Tensor:
        """y[:, columns] = x of x float32 [t, n] and distinct columns int64 [n] below `size`:
        returns float32 [t, size], -inf elsewhere."""

    # ---- the cache ----

    def kv_write(self, storage: Tensor, slots: Tensor, values: Tensor, scale: float) -> None:
        """storage[slots] = values / scale in the storage's format, clamped to its range, rounded
        once. storage kv_dtype [slots, kv_heads, columns], slots int32 [t], distinct except in the
        null page; values activations [t, kv_heads, d], d ≤ columns: further ones become 0."""

    def kv_move(self, storages: Sequence[Tensor], moves: Tensor) -> None:
        """In all storages kv_dtype [slots, kv_heads, columns]: reads all slots moves[:, 0], then
        writes them to moves[:, 1]; moves int32 [m, 2]."""

    # ---- sampling: formulas in `sample/` ----

    def sample_tokens(
        self, logits: Tensor, floats: Tensor, ints: Tensor, cuts: bool
    ) -> tuple[Tensor, Tensor]:
        """Returns tokens and states int64 [s] for logits activations [s, vocab], or float32, with
        the bits of `kernels.cpu.sample`. floats float64 [s, FLOATS] as in `params.Numbers`; ints
        int64 [s, INTS]: top-k, then `formulas.counter`. `cuts`: a row has a top-k or top-p."""

    def compute_logprobs(
        self, logits: Tensor, token_ids: Tensor, k: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns log-probabilities from logits float32 [s, vocab]: chosen float32 [s] of token_ids
        int64 [s] (-1: none); of the k best top_ids int64 [s, k], top float32 [s, k]. CPU's bits."""


def copies_with_numpy(tensor: Tensor) -> bool:
    """Whether numpy should copy `tensor`. On a CPU torch's threads would spin for milliseconds
    after a copy, on cores that our helper threads need."""
    return tensor.device.type == "cpu" and tensor.dtype is torch.float32


def concat(parts: Sequence[Any], dim: int) -> Tensor:
    """Concatenates tensors or numpy arrays along `dim`; with torch while a recorder is active."""
    if isinstance(parts[0], Tensor):
        if active_modes() or not copies_with_numpy(parts[0]):
            return torch.cat(tuple(parts), dim)
        parts = [each.numpy() for each in parts]
    return torch.from_numpy(np.concatenate(parts, dim))


def copy_into(source: Tensor, target: Tensor) -> None:
    """Copies `source` into `target`."""
    if copies_with_numpy(target):
        target.numpy()[:] = source.numpy()
    else:
        target.copy_(source)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a host tensor to `device`, from pinned memory, so that nothing waits."""
    if device.type == "cpu":
        return values
    pinned = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    return pinned.copy_(values).to(device, non_blocking=True)


# ---- operations: calls that a recorder takes as one ----


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that sees torch's calls on this thread, and every call of an operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: else torch would load its compiler, which takes seconds, to skip `cls`."""
        return False

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Executes a call of an operation, and records it."""


def operation(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """Wraps `function` so that an active recorder receives its calls."""

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
    """Marks a function of which a recorder sees every part: compiled kernels, which are recorded
    one by one (`kernels.cpu.threads`), views, and torch's own calls."""
    setattr(function, TRANSPARENT, True)
    return function


NAMES = [n for n, f in vars(Ops).items() if inspect.isfunction(f) and not n.startswith("_")]


def mark_operations(table: Ops) -> Ops:
    """Makes every function of `table` an operation; returns `table`."""
    for name in NAMES:
        setattr(table, name, operation(getattr(table, name)))
    return table


def unmarked_operations(table: Ops) -> list[str]:
    """Returns the functions of `table` that are not operations: a recorder would miss them."""
    return [name for name in NAMES if not hasattr(getattr(table, name), MARK)]
