"""What a backend is: two methods and a table of what it can do.

`lower` is host work before every launch; `attend` runs on the device and can be captured. What a
row sees and how a layer scores are derived here once, for every backend but the reference, which
has its own plain words for them and is the definition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lockstep.kv.pool import Keys
from lockstep.order import LN2, LOG2E
from lockstep.plan.image import Views
from lockstep.plan.step import FreshGroup, Group, PagedGroup, StepPlan
from lockstep.types import AttnSpec, GroupSpec

INVARIANCES = frozenset({"batch", "chunk", "prefix", "page", "pad", "tree", "decode", "threads"})


ANY_PAGE_SIZE = None  # a backend whose addresses do not care


@dataclass(frozen=True)
class Caps:
    """What a backend can do, as data. What it does not state it cannot do, and it is refused.

    devices            names of torch devices: cpu, cuda
    activation_dtypes  of queries and outputs
    kv_dtypes          of the cache (`types.KV_FORMATS`)
    layouts            how a group keeps its keys (`types.Layout`)
    head_multiple      head sizes, as they are stored (`order.stored_len`), are multiples of this
    head_max           and at most this
    page_sizes         keys per page; ANY_PAGE_SIZE for all
    order              "canonical": bits are promised, those over `invariances`; "none": values only
    """

    devices: frozenset[str] = frozenset()
    activation_dtypes: frozenset[str] = frozenset()
    kv_dtypes: frozenset[str] = frozenset()
    layouts: frozenset[str] = frozenset()
    head_multiple: int = 1
    head_max: int = 0
    page_sizes: frozenset[int] | None = frozenset()
    window: bool = False
    non_causal: bool = False
    soft_cap: bool = False
    sinks: bool = False
    tails: bool = False
    graphs: bool = False
    order: str = "none"
    invariances: frozenset[str] = frozenset()


class Backend(Protocol):
    """An attention implementation. A backend is a file; `Backend` in it is this."""

    caps: Caps

    def lower(self, plan: StepPlan, group: Group, views: Views) -> Any:
        """Host, before every launch, never captured: whatever `attend` needs besides tensors. Knows
        the group's spec."""
        ...

    def attend(self, q: Tensor, keys: Keys, handle: Any, spec: AttnSpec) -> tuple[Tensor, Tensor]:
        """Device. q [T, heads, d_qk]; returns out [T, heads, d_v] and lse [T, heads]: float32,
        natural log of the denominator, sink included; a row that sees nothing has out 0 and lse
        -inf."""
        ...


def visible(plan: StepPlan, group: Group) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Per row, the positions it sees: lo <= p < hi. Window and causality of every backend come from
    here."""
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
    return np.asarray(np.maximum(hi - spec.window, 0), np.int32)


def addresses(plan: StepPlan, group: Group, views: Views) -> tuple[Any, Any, Any, int]:
    """page_ids, page_indptr, first_pos and page size of a group. A fresh group's rows are pages of
    one, in order."""
    if isinstance(group, FreshGroup):
        rows = np.arange(plan.bucket.tokens, dtype=np.int32)
        return rows, plan.q_indptr, np.zeros(plan.bucket.requests, np.int32), 1
    return views.page_ids, views.page_indptr, views.first_pos, group.spec.page_size


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


def natural(lse2: Any) -> Any:
    """LSE is natural log everywhere inside Lockstep; kernels that work in base 2 convert here:
    arrays or tensors."""
    return lse2 * LN2
