"""What a backend is: a table of what it can do, and how a step becomes a launch.

`lower` writes numbers into a step's image; `bind` sees addresses and the bucket and no number, so
that a launch can be recorded once per bucket and replayed. What a row sees and how a layer scores
are derived here once, for every backend but the reference, which has its own plain words for them.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kv.pool import Keys
from lockstep.order import LOG2E
from lockstep.plan.address import first_seen
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket, Group, PagedGroup, StepPlan
from lockstep.types import AttnSpec, GroupSpec, Layout

INVARIANCES = frozenset({"batch", "chunk", "prefix", "page", "pad", "tree", "decode", "threads"})
ANY_PAGE_SIZE = None  # a backend whose addresses do not care


@dataclass(frozen=True)
class Caps:
    """What a backend can do, as data. What it does not state it cannot do, and it is refused."""

    devices: frozenset[str] = frozenset()  # names of torch devices: cpu, cuda
    activation_dtypes: frozenset[str] = frozenset()  # of queries and outputs
    kv_dtypes: frozenset[str] = frozenset()  # of the cache (`types.KV_FORMATS`)
    layouts: frozenset[str] = frozenset()  # how a group keeps its keys (`types.Layout`)
    head_multiple: int = 1  # head sizes, as stored (`order.stored_len`), are multiples of this
    head_max: int = 0  # and at most this
    page_sizes: frozenset[int] | None = frozenset()  # keys per page; ANY_PAGE_SIZE for all
    window: bool = False
    non_causal: bool = False
    soft_cap: bool = False
    sinks: bool = False
    tails: bool = False
    # a launch may be recorded: it depends on the bucket, on what `lower` returned and on the
    # image's numbers where they lie, on nothing else
    graphs: bool = False
    chains: bool = False  # it is a `ChainBackend`: launches may guess on
    # attributes of a handle that are buffers of a library's own planner and not parts of the image:
    # `lower` fills them, one set per group and bucket
    planner_buffers: tuple[str, ...] = ()
    order: str = "none"  # "canonical": bits are promised, over `invariances`; "none": values only
    invariances: frozenset[str] = frozenset()


# What all backends of this package have. A new feature is stated by those that have it, not here.
EVERY_FEATURE = Caps(
    layouts=frozenset(Layout),
    page_sizes=ANY_PAGE_SIZE,
    window=True,
    non_causal=True,
    soft_cap=True,
    sinks=True,
    tails=True,
)


class Backend(Protocol):
    """An attention implementation. A backend is a file; `Backend` in it is this.

    Per step and group: `lower`, then the one copy of the image, then `attend` of every layer. One
    that derives nothing inherits `derived_len` and `lower`.
    """

    caps: Caps

    def derived_len(self, spec: GroupSpec, bucket: Bucket) -> int:
        """How many int32 `lower` writes for a group of any step of this bucket (`Bucket.of`: its
        own)."""
        return 0

    def lower(self, plan: StepPlan, group: Group, views: PlanArrays) -> Hashable:
        """Host, before every step, never recorded: fills `views.derived`, int32 [derived_len], all
        of it; `views` are numpy arrays of the step's image. Touches no cache.

        Returns which launch this is, where the bucket alone does not say it: a recorded launch is
        replayed for steps of the same bucket and the same answer.
        """
        return None

    def wider(self, spec: GroupSpec, bucket: Bucket, variant: Hashable) -> tuple[Hashable, ...]:
        """Other answers of `lower` for steps of this bucket, which would serve this step too: who
        records launches ahead records these as well."""
        return ()

    def bind(self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Hashable) -> Any:
        """The handle of a launch: `views` are the image's arrays on the device, whose numbers may
        not be read here; `variant` is what `lower` returned."""

    def attend(self, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """Device. q activations [T, heads, d_qk]; out activations [T, heads, d_v] and lse float32
        [T, heads], natural log of the denominator, sink included; a row that sees nothing has out 0
        and lse -inf."""


class ChainBackend(Backend, Protocol):
    """A backend that states `chains`."""

    def advance(self, handle: Any, views: PlanArrays, counters: Tensor | None) -> None:
        """Device. A step with one plain row of every request, in the image, becomes the one behind
        it. counters int64 [T, n], or None but for the first group: its positions and starts are the
        others' too, and column 0 of these goes with them."""


def visible(plan: StepPlan, group: Group) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per row, the positions it sees: lo and hi int32 [T], lo <= p < hi. Window and causality of
    every backend come from here."""
    if group.spec.causal:
        hi = plan.positions + np.int32(1)
    elif isinstance(group, PagedGroup):
        hi = group.kv_lens[plan.request]
    else:
        hi = plan.new_lens[plan.request]
    return window_begin(group.spec, plan, hi), hi


def window_begin(spec: GroupSpec, plan: StepPlan, hi: NDArray[np.int32]) -> NDArray[np.int32]:
    """The first position each row sees: its last w keys, or all of them."""
    if spec.window is None:
        return np.zeros_like(hi)
    return np.asarray(first_seen(hi, spec.window), np.int32)


def addresses(spec: GroupSpec, views: PlanArrays) -> tuple[Any, Any, Any, int]:
    """page_ids, page_indptr, first_pos and page size; a fresh group's rows are pages of one."""
    size = 1 if spec.layout is Layout.FRESH else spec.page_size
    return views.page_ids, views.page_indptr, views.first_pos, size


def lists(spec: GroupSpec, views: PlanArrays) -> tuple[Any, Any, Any]:
    """start, tail_indptr and tail_slots; no row of a cross or fresh group reaches its start."""
    return views.start, views.tail_indptr, views.tail_slots


def score_constants(spec: AttnSpec) -> tuple[float, float]:
    """(pre, c): the softmax takes exp2(c * x), where x is q.k, or tanh(pre * q.k) when pre is not
    0. One host product each."""
    if spec.soft_cap is None:
        return 0.0, spec.scale * spec.k_scale * LOG2E
    return spec.scale * spec.k_scale / spec.soft_cap, spec.soft_cap * LOG2E


def value_scale(spec: AttnSpec) -> float:
    """Multiplies the output once, after the division."""
    return spec.v_scale


def sink_logits2(spec: AttnSpec, heads: int) -> NDArray[np.float32]:
    """[heads] sinks in base 2; -inf, which adds nothing, where there are none."""
    if spec.sinks is None:
        return np.full(heads, -np.inf, np.float32)
    return (np.asarray(spec.sinks, np.float64) * LOG2E).astype(np.float32)
