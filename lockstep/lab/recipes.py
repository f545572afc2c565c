"""The step kinds of a serving engine, as stories: one recipe each.

A recipe writes a script; it says which counters must have moved, because an equality is worth
nothing if its path was not taken. Lengths sit where things break: one below, at and above the
window (20), the tile (64, or 32), the page sizes and the first split of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from lockstep.lab.features import WINDOW as W
from lockstep.lab.features import Feature
from lockstep.lab.script import Compute, Drop, Script
from lockstep.order import attention_order, device_class
from lockstep.types import Layout

LENGTHS = (1, 15, 16, 17, 63, 65, 130)
# new rows of a step: of every request, of all that are open alike, or of some in this order
Rows = tuple[int, ...] | int | dict[int, int]


@dataclass(frozen=True)
class Recipe:
    """A column of a table. `play` writes a script, or plays stories on a rig;
    `required_counters` must be above 0 afterwards."""

    name: str
    description: str
    play: Callable[..., None]
    required_counters: tuple[str, ...]
    applies_to: Callable[[Any], bool]  # to a feature, or a model


def cached(feature: Feature) -> bool:
    """Everything with a cache."""
    return not feature.fresh


def uncached(feature: Feature) -> bool:
    """Embedding models and encoders."""
    return feature.fresh


def apart(feature: Feature) -> bool:
    """Values of their own: an infinity in a latent row would be one in its key."""
    return cached(feature) and all(g.layout is not Layout.LATENT for g in feature.groups(16))


def recipe(
    name: str, *required_counters: str, applies_to: Callable[[Any], bool] = cached
) -> Callable[[Callable[..., None]], Recipe]:
    """Makes a recipe of the function that plays it, described by its docstring's first sentence."""

    def make(play: Callable[..., None]) -> Recipe:
        text = " ".join((play.__doc__ or "").split()).partition(". ")[0]
        description = text[:1].lower() + text[1:].rstrip(".")
        return Recipe(name, description, play, required_counters, applies_to)

    return make


def extend(s: Script, *steps: Rows, **options: Sequence[Any]) -> list[int]:
    """Steps of new rows, of requests that are opened as they come: which those of the last were.
    `options` of `Script.extend` have one entry per request."""
    told: dict[int, int] = {}
    for step in steps:
        if isinstance(step, int):
            step = dict.fromkeys(s.committed, step)
        told = step if isinstance(step, dict) else dict(enumerate(step))
        while len(s.committed) <= max(told, default=-1):
            s.open()
        acts = []
        for at, (request, count) in enumerate(told.items()):
            own = {name: values[at] for name, values in options.items()}
            acts.append(s.extend(request, count, **own))
        s.step(*acts)
    return list(told)


@recipe("decode", "decode_rows", "batched_steps", "rows_over_a_split")
def decode(s: Script) -> None:
    """One new token per request."""
    extend(s, (1, 16, 19, 63, 129, s.split - 1), 1, 1, 1)


@recipe("extend-cold", "batched_steps", "rows_over_a_split")
def extend_cold(s: Script) -> None:
    """Whole prompts, nothing cached."""
    extend(s, (*LENGTHS, s.split + 33))


@recipe("extend-prefix", "prefix_rows", "batched_steps")
def extend_prefix(s: Script) -> None:
    """New rows after a cached prefix."""
    extend(s, (W - 1, W, W + 1, 2 * W, 64, s.split - 3), (W + 2, W + 5, 1, 70, 3, 7))


@recipe("chunked", "prefix_rows", "batched_steps")
def chunked(s: Script) -> None:
    """Prompts in chunks."""
    extend(s, *((n, n + 1, n + 2) for n in (7, 16, 1, 41, 64)))


@recipe("mixed", "prefix_rows", "decode_rows", "batched_steps")
def mixed(s: Script) -> None:
    """Decode and prefill in one batch."""
    extend(s, (33, 65, 128), (1, 1, 1, 70), {4: 1, 0: 40, 3: 1, 2: 1})


@recipe("empty", "empty_steps")
def empty(s: Script) -> None:
    """Steps without requests."""
    extend(s, (), (5, 66), (), 1)


@recipe("verify-chain", "rejected_rows", "batched_steps")
def verify_chain(s: Script) -> None:
    """Drafts in a row, some rejected and written over."""
    extend(s, (19, 62, s.split - 3))
    extend(s, 5, keep=(1, 5, 3))
    extend(s, 5, keep=(4, 1, 5))


TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 6)
SHALLOW_END = (-1, 0, 0, 1, 1, 2, 3, 3, 6, 0)  # as many nodes, and the last one is not the deepest


@recipe("verify-tree", "tail_rows", "tails_over_a_tile", "tails_over_a_split", "shallow_ends")
def verify_tree(s: Script) -> None:
    """A tree of drafts over tile and split."""
    extend(s, (18, 30, 62, s.split - 2))
    s.step(*(s.tree(r, t) for r, t in enumerate((TREE, SHALLOW_END, SHALLOW_END, TREE))))


@recipe("tree-accept", "tail_rows", "moved_rows", "accepted_nodes")
def tree_accept(s: Script) -> None:
    """Accepted nodes move to their places."""
    rs = extend(s, (17, 61, s.split - 3))
    for path in ((0, 1, 3, 6, 9), (0, 2, 5)):
        s.step(*(s.tree(r, TREE) for r in rs))
        s.step(*(a for r in rs for a in (s.accept(r, path), s.extend(r, 2))))


@recipe("draft-decode", "tail_rows", "tails_over_a_tile", "tails_over_a_split")
def draft_decode(s: Script) -> None:
    """Three branches, four steps. The first step's rows hang below the prefix, each later row below
    its branch."""
    rs = extend(s, (14, 61, s.split - 2))
    parents: tuple[int, ...] = ()
    for step in range(4):
        parents += (-1, -1, -1) if step == 0 else tuple(3 * (step - 1) + b for b in (0, 1, 1))
        s.step(*(s.tree(r, parents, new=3) for r in rs))


@recipe("draft-extend", "prefix_rows", "batched_steps")
def draft_extend(s: Script) -> None:
    """Ragged numbers of accepted tokens."""
    extend(s, (15, 63, 64, s.split - 2), (1, 4, 2, 5))


@recipe("draft-extend-fixed", "prefix_rows", "rejected_rows")
def draft_extend_fixed(s: Script) -> None:
    """A fixed width of which some rows count."""
    extend(s, (15, 63, 64, s.split - 2))
    extend(s, 5, keep=(1, 4, 2, 5), emit=((0,), (3,), (1,), (4,)))
    extend(s, 1)


@recipe("fork", "forks", "shared_pages", "moved_rows")
def fork(s: Script) -> None:
    """Several continuations of one prompt. n > 1: completions share the prompt's whole pages, and
    get the partial one as their own."""
    pairs = [s.fork(r) for r in extend(s, (16, 21, 75)) for _ in range(2)]
    s.step(*(f for _, f in pairs), *(s.extend(c, 1) for c, _ in pairs))
    extend(s, 1, 1)


@recipe("multi-item", "forks", "shared_pages", "moved_rows")
def multi_item(s: Script) -> None:
    """One prefix, many items. Each item sees the prefix and itself, at positions that follow the
    prefix."""
    (prefix,) = extend(s, (70,))
    pairs = [s.fork(prefix) for _ in range(5)]
    s.step(*(f for _, f in pairs), *(s.extend(c, 3 + 4 * i) for i, (c, _) in enumerate(pairs)))


@recipe("preempt-resume", "drops", "reused_pages")
def preempt_resume(s: Script) -> None:
    """Pages taken away and computed again."""
    extend(s, (22, 67, 128), 1)
    s.step(Drop(1), s.extend(0, 1))
    extend(s, {0: 30, 2: 1})
    s.step(s.again(1, 68), s.extend(0, 1))
    extend(s, 1)


@recipe("reuse", "drops", "reused_pages")
def reuse(s: Script) -> None:
    """Dirty pages of finished requests. Shrink after grow: pages of finished requests are dirty
    when the next ones get them."""
    s.step(*(Drop(r) for r in extend(s, (200, 90, 40))))
    extend(s, {3: 3, 4: 50}, {3: 9, 4: 9})


@recipe("encode-decode", "encoder_rows", "batched_steps", applies_to=lambda f: bool(f.encode))
def encode_decode(s: Script) -> None:
    """Encoders of different lengths."""
    s.step(*(s.encode(s.open(), n) for n in (1, 16, 65, 130)))
    extend(s, (3, 1, 20, 2), 1, 1)


@recipe(
    "window-edges",
    *("rows_beyond_window", "dropped_positions"),
    applies_to=lambda f: cached(f) and f.window is not None,
)
def window_edges(s: Script) -> None:
    """Below, at and above the window. By prefill and by decode, and far enough that pages behind it
    are dropped."""
    extend(s, (W - 2, W - 1, W, W + 1, 3 * W + 5, 120), 1, 2, 1, W, 1)


@recipe("overflow", "infinite_keys", "batched_steps", applies_to=apart)
def overflow(s: Script) -> None:
    """Values that are infinite. In the middle of a step's rows: rows before them do not see them,
    rows behind them do."""
    extend(s, (5, 50), (17, 18))
    for uids in (act.uids for act in s.steps[-1] if isinstance(act, Compute)):
        s.infinite += [uids[9], uids[-1]]
    extend(s, 1)


@recipe("embed", "batched_steps", applies_to=uncached)
def embed(s: Script) -> None:
    """Whole requests without a cache."""
    extend(s, LENGTHS)


@recipe("embed-long", "rows_over_a_split", applies_to=uncached)
def embed_long(s: Script) -> None:
    """A request longer than a split."""
    extend(s, (2, s.split + 18))


@recipe("embed-empty", "empty_steps", applies_to=uncached)
def embed_empty(s: Script) -> None:
    """Steps without requests."""
    extend(s, (), (5, 66), ())


RECIPES = (
    *(decode, extend_cold, extend_prefix, chunked, mixed, empty, verify_chain, verify_tree),
    *(tree_accept, draft_decode, draft_extend, draft_extend_fixed, fork, multi_item),
    *(preempt_resume, reuse, overflow, window_edges, encode_decode),
    *(embed, embed_long, embed_empty),
)


def write(recipe: Recipe, feature: Feature) -> Script:
    """The recipe's script for a feature; with an encoder, each request is encoded first."""
    specs, device = feature.groups(16), device_class(feature.device.ops.machine)
    splits = [attention_order(device, spec.d_qk, spec.d_v).splits for spec in specs]
    script = Script(split=max(each.begin(1) for each in splits))
    recipe.play(script)
    if feature.encode and not script.encoder_uids:
        add_encoders(script)
    return script


def add_encoders(script: Script) -> None:
    """Encoders of odd lengths for requests that were told without; a fork shares its parent's."""
    told, lengths = script.steps, cycle((33, 1, 64, 20, 65, 7, 16, 5))
    script.steps = []
    for step in told:
        fresh = [a for a in step if isinstance(a, Compute) and a.cached_len == 0]
        if fresh:
            script.step(*(script.encode(a.request, next(lengths)) for a in fresh))
        script.step(*step)
    for request, lineage in script.lineage.items():
        script.encoder_uids[request] = script.encoder_uids[lineage[-1]]
