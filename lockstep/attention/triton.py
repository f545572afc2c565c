"""Attention on an NVIDIA GPU (sm_90): our own Triton kernels, in the canonical order of that device
class. `lower` cuts a step into work items, whose tables are in its image; `attend` launches. Triton
itself is imported by the first launch."""

import os
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from lockstep import order
from lockstep.attention import base
from lockstep.kernels.triton import items, launch
from lockstep.kernels.triton.items import ITEM
from lockstep.kernels.triton.launch import Arguments, Tuning
from lockstep.kv.pool import Keys, pad_columns
from lockstep.plan.bucket import RECORDED_ROWS
from lockstep.plan.build import next_power_of_2
from lockstep.plan.image import PlanArrays
from lockstep.plan.step import Bucket, FreshGroup, Group, StepPlan
from lockstep.types import AttnSpec, GroupSpec, Layout, RuleError

CAPS = replace(
    base.EVERY_FEATURE,
    devices=frozenset({"cuda"}),
    activation_dtypes=frozenset({"bfloat16", "float16"}),
    kv_dtypes=frozenset({"bfloat16", "float16", "float8_e4m3"}),
    head_multiple=8,
    head_max=576,
    graphs=True,
    order="canonical",
    invariances=base.INVARIANCES - {"threads"},
)
EXTRAS = (0, 16, 64, 256)  # room for items beyond one per block, where requests have few rows
EMPTY_ITEM = (0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0)  # an item without rows: its block's only one
HALF = (-65504.0, 65504.0)  # the range of float16, to which bfloat16 queries are clamped


@dataclass(frozen=True)
class Launch:
    """One launch of the kernel: its shape, its items, and the room for their parts per kv head."""

    tuning: Tuning
    items: int
    part_rows: int
    counters: int


@dataclass(frozen=True, eq=False)
class Handle:
    """A bound group: everything the kernel takes besides queries and keys."""

    spec: GroupSpec
    launches: tuple[tuple[Launch, Tensor], ...]  # each with the table of its items
    arguments: dict[AttnSpec, Arguments]


class Backend:
    """Has no state."""

    caps = CAPS

    def derived_len(self, spec: GroupSpec, bucket: Bucket) -> int:
        """Returns the room for the items of all launches."""
        return ITEM * most_items(spec, bucket)

    def lower(self, plan: StepPlan, group: Group, views: PlanArrays) -> tuple[Launch, ...]:
        """Writes the items; returns the launches, whose number and size depend on the step. If all
        requests have few rows, launches are padded with empty items: few sizes serve a bucket."""
        spec = group.spec
        chosen = order.attention_order(order.SM90, spec.d_qk, spec.d_v)
        rows, tree = seen_rows(plan, group), has_trees(spec, plan.bucket)
        compiled = os.environ.get("TRITON_INTERPRET") != "1"
        launches, at = [], 0
        views.derived.reshape(-1, ITEM)[:] = EMPTY_ITEM
        for shape, requests, parts in launch.choose(spec, rows, compiled, tree, chosen):
            size = (launch.group_of(spec, shape), shape.rows)
            table, *room = items.items(rows, requests, *size, chosen.splits, parts)
            one = Launch(shape, len(table), *room)
            if few_rows(plan.bucket):
                one = round_launch(one, spec.group_size * plan.bucket.width)
            views.derived[at : at + table.size] = table.ravel()
            at += ITEM * one.items
            launches.append(one)
        return tuple(launches)

    def wider(
        self, spec: GroupSpec, bucket: Bucket, variant: tuple[Launch, ...]
    ) -> tuple[tuple[Launch, ...], ...]:
        """Returns launches with room for more items, up to the bucket's most, if rows are few."""
        if not few_rows(bucket) or len(variant) != 1:
            return ()
        (one,), rows = variant, spec.group_size * bucket.width
        most = most_items(spec, bucket) - one.counters
        rooms = [n for n in EXTRAS if one.items - one.counters < n <= most]
        return tuple((round_launch(replace(one, items=one.counters + n), rows),) for n in rooms)

    def bind(
        self, spec: GroupSpec, bucket: Bucket, views: PlanArrays, variant: tuple[Launch, ...]
    ) -> Handle:
        """Returns the image's arrays as the kernels take them, and scratch memory."""
        derived = torch.as_tensor(views.derived)
        sizes = [one.items for one in variant]
        tables = torch.split(derived.view(-1, ITEM)[: sum(sizes)], sizes)
        page_ids, _, _, page_size = base.addresses(spec, views)
        chosen = order.attention_order(order.SM90, spec.d_qk, spec.d_v)
        arguments = launch.arguments(spec, page_size, chosen, has_trees(spec, bucket))
        names = ("page_ids", "positions", "start", "tail_indptr", "tail_slots")
        image = (page_ids, views.positions, *base.slot_lists(spec, views))
        arguments |= zip(names, map(torch.as_tensor, image), strict=True)
        part_rows = max((one.part_rows for one in variant), default=0) * spec.kv_heads
        counters = max((one.counters for one in variant), default=0) * spec.kv_heads
        arguments |= launch.scratch(part_rows, counters, arguments["DV"], derived.device)
        layers = dict.fromkeys(spec.layers)
        scored = {
            attn: arguments | score_arguments(attn, spec.heads, derived.device) for attn in layers
        }
        return Handle(spec, tuple(zip(variant, tables, strict=True)), scored)

    def attend(
        self, q: Tensor, keys: Keys, handle: Handle, spec: AttnSpec
    ) -> tuple[Tensor, Tensor]:
        """Runs one kernel per launch; none if there are no rows."""
        group = handle.spec
        check(q, keys, group)
        d_qk, d_v = order.stored_len(group.d_qk), order.stored_len(group.d_v)
        out = torch.empty(*q.shape[:2], d_v, dtype=q.dtype, device=q.device)
        if keys.k.dtype is torch.float16 and q.dtype is not torch.float16:
            q = q.clamp(*HALF).half()
        # whether values are the first columns of the keys, in the same memory, cached or fresh
        shared = keys.v.data_ptr() == keys.k.data_ptr()
        arguments = handle.arguments[spec] | {
            "q": pad_columns(q, d_qk),
            "k": keys.k,
            "v": keys.v,
            "LATENT": shared and d_v == handle.arguments[spec]["DA"],
            "out": out,
            "lse": torch.empty(*q.shape[:2], dtype=torch.float32, device=q.device),
        }
        for one, table in handle.launches:
            launch.launch(arguments, table, one.tuning)
        return out[..., : group.d_v], arguments["lse"]


def check(q: Tensor, keys: Keys, group: GroupSpec) -> None:
    """Raises for queries and keys that no kernel takes."""
    if q.dtype not in (torch.bfloat16, torch.float16) or q.shape[1:] != (group.heads, group.d_qk):
        rule = f"queries are bfloat16 or float16 of [rows, {group.heads}, {group.d_qk}]"
        raise RuleError(rule, f"{q.dtype} of {list(q.shape)}", "Cast them, or use another backend")
    if keys.k.dtype not in (q.dtype, torch.float16, torch.float8_e4m3fn):
        rule = f"K and V are {q.dtype}, like the queries, float16 or float8_e4m3"
        raise RuleError(rule, f"{keys.k.dtype}", "Set kv_cache_dtype")


def seen_rows(plan: StepPlan, group: Group) -> items.Rows:
    """Returns what each row sees, on the host."""
    lo, hi = base.visible(plan, group)
    if isinstance(group, FreshGroup):
        return items.Rows(plan.q_indptr, lo, hi, hi, plan.q_indptr[:-1])
    first_pages = group.first_pos // group.spec.page_size
    entries = np.asarray(group.page_indptr[: len(first_pages)] - first_pages, np.int32)
    return items.Rows(plan.q_indptr, lo, hi, plan.start if group.spec.causal else hi, entries)


def round_launch(one: Launch, rows: int) -> Launch:
    """Rounds up a launch with at most `rows` rows per block, so that there are few sizes: rounds
    the items beyond one per block, and makes room for every item to be a part."""
    items = one.counters + room_for(one.items - one.counters)
    return Launch(one.tuning, items, items * min(one.tuning.rows, rows), one.counters)


def room_for(extra: int) -> int:
    """Returns the number of items beyond one per block, rounded up."""
    return next((n for n in EXTRAS if n >= extra), next_power_of_2(extra))


def few_rows(bucket: Bucket) -> bool:
    """Whether all requests have the same few rows: a step that decodes, drafts or verifies."""
    return 0 < bucket.width <= RECORDED_ROWS


def has_trees(spec: GroupSpec, bucket: Bucket) -> bool:
    """Whether rows of a step may have slot lists."""
    return spec.layout is not Layout.FRESH and spec.causal and bucket.tail > 0


def most_items(spec: GroupSpec, bucket: Bucket) -> int:
    """Returns the most items of any step of a bucket. A request's first block has one per split
    that it sees; others have one or, where blocks are few, one per split of the longest request."""
    tree, tokens = has_trees(spec, bucket), bucket.tokens
    requests, flat = min(bucket.requests, tokens), tokens * spec.group_size
    splits = order.attention_order(order.SM90, spec.d_qk, spec.d_v).splits
    shortest = min(splits.len0, splits.len1)
    keys = tokens
    if spec.layout is not Layout.FRESH:
        keys = bucket.pages[0] * spec.page_size + requests * bucket.tail
    if few_rows(bucket):
        blocks = -(-spec.group_size * bucket.width // launch.FEW)
        return blocks * requests + room_for(blocks * (requests + keys // shortest))
    whole, parts = launch.many(spec, tree), launch.some(spec, tree)
    few = flat if whole.parts else min(flat, launch.PROGRAMS // spec.kv_heads * whole.rows)
    in_parts = few // parts.rows * (keys // shortest + 2)
    first_blocks = 2 * requests + keys // shortest
    return first_blocks + requests + max(flat // whole.rows, in_parts) + tokens // launch.TOKENS


@cache
def score_arguments(attn: AttnSpec, heads: int, device: torch.device) -> Arguments:
    """Returns a layer's arguments of a launch; cached, as copying sinks to the device waits."""
    pre, c = base.score_constants(attn)
    return {
        "c": c,
        "pre": pre,
        "v_scale": base.value_scale(attn),
        "sinks2": torch.from_numpy(base.sink_logits2(attn, heads)).to(device),
        "CAP": pre != 0.0,
    }
