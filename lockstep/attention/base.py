"""What a backend is: a table of its capabilities, and the calls that make a step a launch.

`lower` writes numbers into a step's image; `bind` sees the bucket and addresses but no numbers, so
that a launch can be recorded once per bucket and replayed. The keys that a row sees and a layer's
score constants are derived here for all backends but the reference, which states its own."""

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
ANY_PAGE_SIZE = None  # every page size is supported


@dataclass(frozen=True)
class Caps:
    """A backend's capabilities, as data. What it does not state is refused."""

    devices: frozenset[str] = frozenset()  # names of torch devices: cpu, cuda
    activation_dtypes: frozenset[str] = frozenset()  # of queries and outputs
    kv_dtypes: frozenset[str] = frozenset()  # of the cache (`types.KV_FORMATS`)
    layouts: frozenset[str] = frozenset()  # how a group stores its keys (`types.Layout`)
    head_multiple: int = 1  # head sizes, as stored (`order.stored_len`), are multiples of this
    head_max: int = 0  # and at most this
    page_sizes: frozenset[int] | None = frozenset()  # keys per page; ANY_PAGE_SIZE for all
    window: bool = False
    non_causal: bool = False
    soft_cap: bool = False
    sinks: bool = False
    tails: bool = False
    # a launch may be recorded: it depends on the bucket, on what `lower` returned and on the
    # numbers it reads from the image, and on nothing else
    graphs: bool = False
    chains: bool = False  # it is a `ChainBackend`: one launch may draft several tokens in turn
    # attributes of a handle that are buffers of a library's own planner and not parts of the image:
    # `lower` fills them, one set per group and bucket
    planner_buffers: tuple[str, ...] = ()
    order: str = "none"  # "canonical": bits are promised, over `invariances`; "none": values only
    invariances: frozenset[str] = frozenset()


# What all backends of this package support. Backends state a new feature themselves, not here.
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
    """An attention implementation. A backend is a file whose class `Backend` implements this.

    Per step and group: `lower`, then the one copy of the image, then `attend` of every layer. A
    backend that derives nothing inherits `derived_len` and `lower`."""

    caps: Caps

    def derived_len(self, spec: GroupSpec, bucket: Bucket) -> int:
        """Returns how many int32 numbers `lower` writes in any step of the group's `bucket`."""
        return 0

    def lower(self, plan: StepPlan, group: Group, views: PlanArrays) -> Hashable:
        """Runs on the host before every step, and is never recorded. Fills all of `views.derived`,
        int32 [derived_len]; `views` are numpy arrays of the step's image. Touches no cache.

        Returns the variant of the launch, if the bucket does not determine it: a recorded launch is
        replayed for steps of the same bucket and variant."""
        return None

    def wider(self, spec: GroupSpec, bucket: Bucket, variant: Hashable) -> tuple[Hashable, ...]:
        """Returns further variants for steps of this bucket that would serve a step of `variant`
        too: a runner that records launches ahead of time records these as well."""
        return ()

    def bind(self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: Hashable) -> Any:
        """Returns the handle of a launch. `views` are the image's arrays on the device, whose
        numbers may not be read here; `variant` is what `lower` returned."""

    def attend(self, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """Runs on the device: q activations [T, heads, d_qk]. Returns out activations [T, heads,
        d_v] and lse float32 [T, heads], the natural log of the denominator, sink included; a row
        that sees no key has out 0 and, without a sink, lse -inf."""


class ChainBackend(Backend, Protocol):
    """A backend that states `chains`."""

    def advance(self, handle: Any, views: PlanArrays, counters: Tensor | None) -> None:
        """Runs on the device: advances the image's step, one plain row of every request, to the
        next. counters int64 [T, n] for the first group, None for others: the first call advances
        positions and starts, which groups share, and column 0 of the counters."""


def visible(plan: StepPlan, group: Group) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Returns the positions that each row sees: lo and hi int32 [T], lo <= p < hi. Every backend
    takes window and causality from here."""
    if group.spec.causal:
        hi = plan.positions + np.int32(1)
    elif isinstance(group, PagedGroup):
        hi = group.kv_lens[plan.request]
    else:
        hi = plan.new_lens[plan.request]
    return window_begin(group.spec, plan, hi), hi


def window_begin(spec: GroupSpec, plan: StepPlan, hi: NDArray[np.int32]) -> NDArray[np.int32]:
    """Returns the first position each row sees: that of its last w keys, or 0."""
    if spec.window is None:
        return np.zeros_like(hi)
    return np.asarray(first_seen(hi, spec.window), np.int32)


def addresses(spec: GroupSpec, views: PlanArrays) -> tuple[Any, Any, Any, int]:
    """Returns page_ids, page_indptr, first_pos, page size; a fresh group's rows are pages of 1."""
    size = 1 if spec.layout is Layout.FRESH else spec.page_size
    return views.page_ids, views.page_indptr, views.first_pos, size


def slot_lists(spec: GroupSpec, views: PlanArrays) -> tuple[Any, Any, Any]:
    """Returns start, tail_indptr and tail_slots; in cross and fresh groups no row reaches start."""
    return views.start, views.tail_indptr, views.tail_slots


def score_constants(spec: AttnSpec) -> tuple[float, float]:
    """Returns (pre, c): the softmax takes exp2(c * x), where x is q.k, or tanh(pre * q.k) if pre is
    not 0. Each is computed once, on the host."""
    if spec.soft_cap is None:
        return 0.0, spec.scale * spec.k_scale * LOG2E
    return spec.scale * spec.k_scale / spec.soft_cap, spec.soft_cap * LOG2E


def value_scale(spec: AttnSpec) -> float:
    """Returns what the output is multiplied by, once, after the division."""
    return spec.v_scale


def sink_logits2(spec: AttnSpec, heads: int) -> NDArray[np.float32]:
    """Returns the sinks in base 2, [heads]; -inf, which adds nothing, if there are none."""
    if spec.sinks is None:
        return np.full(heads, -np.inf, np.float32)
    return (np.asarray(spec.sinks, np.float64) * LOG2E).astype(np.float32)
