"""Recipes: the columns of both tables, and the stories of the attention's: recipes.toml has most of
them, as lengths alone; those that need more are functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

from lockstep.lab import table
from lockstep.lab.features import WINDOW, Feature
from lockstep.lab.script import Compute, Drop, Script
from lockstep.order import attention_order, device_class
from lockstep.types import Layout


@dataclass(frozen=True)
class Recipe:
    """A column of a table."""

    name: str
    description: str
    play: Callable[..., None]  # writes a script, or plays stories on a harness
    # above 0 afterwards: an equality is worth nothing if its path was not taken
    required_counters: tuple[str, ...]
    applies_to: Callable[[Any], bool]  # to a feature, or a model


APPLIES: dict[str, Callable[[Feature], bool]] = {
    "cached": lambda feature: not feature.fresh,
    "uncached": lambda feature: feature.fresh,
    "window": lambda feature: feature.window is not None and not feature.fresh,
    "encoder": lambda feature: bool(feature.encode),
    # values of their own: an infinity in a latent row would be one in its key
    "apart": lambda feature: (
        not feature.fresh and all(g.layout is not Layout.LATENT for g in feature.groups(16))
    ),
}


def extend(s: Script, *steps: Any) -> list[int]:
    """Steps of new rows, as recipes.toml has them: which requests those of the last were."""
    requests, named = list[int](), {"split": s.split, "window": WINDOW}
    for step in steps:
        told = step if isinstance(step, dict) and "all" in step else {"all": step}
        counts = told["all"]
        if isinstance(counts, int | str):
            counts = dict.fromkeys(s.committed, counts)
        elif not isinstance(counts, dict):
            counts = dict(enumerate(counts))
        requests = [int(request) for request in counts]
        while len(s.committed) <= max(requests, default=-1):
            s.open()
        acts = []
        for at, (request, count) in enumerate(zip(requests, counts.values(), strict=True)):
            keep = told["keep"][at] if "keep" in told else None
            emit = tuple(told["emit"][at]) if "emit" in told else None
            n = sum(named.get(term) or int(term) for term in str(count).split())
            acts.append(s.extend(request, n, keep, emit))
        s.step(*acts)
    return requests


TREE = (-1, 0, 0, 1, 1, 2, 3, 3, 5, 6)
SHALLOW_END = (-1, 0, 0, 1, 1, 2, 3, 3, 6, 0)  # as many nodes, and the last one is not the deepest


def verify_tree(s: Script) -> None:
    extend(s, (18, 30, 62, "split -2"))
    s.step(*(s.tree(r, t) for r, t in enumerate((TREE, SHALLOW_END, SHALLOW_END, TREE))))


def tree_accept(s: Script) -> None:
    rs = extend(s, (17, 61, "split -3"))
    for path in ((0, 1, 3, 6, 9), (0, 2, 5)):
        s.step(*(s.tree(r, TREE) for r in rs))
        s.step(*(a for r in rs for a in (s.accept(r, path), s.extend(r, 2))))


def draft_decode(s: Script) -> None:
    """The first step's rows hang below the prefix, each later row below its branch."""
    rs = extend(s, (14, 61, "split -2"))
    parents: tuple[int, ...] = ()
    for step in range(4):
        parents += (-1, -1, -1) if step == 0 else tuple(3 * (step - 1) + b for b in (0, 1, 1))
        s.step(*(s.tree(r, parents, new=3) for r in rs))


def fork(s: Script) -> None:
    """n > 1: completions share the prompt's whole pages, and get the partial one as their own."""
    pairs = [s.fork(r) for r in extend(s, (16, 21, 75)) for _ in range(2)]
    s.step(*(f for _, f in pairs), *(s.extend(c, 1) for c, _ in pairs))
    extend(s, 1, 1)


def multi_item(s: Script) -> None:
    """Each item sees the prefix and itself, at positions that follow the prefix."""
    (prefix,) = extend(s, (70,))
    pairs = [s.fork(prefix) for _ in range(5)]
    s.step(*(f for _, f in pairs), *(s.extend(c, 3 + 4 * i) for i, (c, _) in enumerate(pairs)))


def preempt_resume(s: Script) -> None:
    extend(s, (22, 67, 128), 1)
    s.step(Drop(1), s.extend(0, 1))
    extend(s, {0: 30, 2: 1})
    s.step(s.again(1, 68), s.extend(0, 1))
    extend(s, 1)


def reuse(s: Script) -> None:
    """Shrink after grow: pages of finished requests are dirty when the next ones get them."""
    s.step(*(Drop(r) for r in extend(s, (200, 90, 40))))
    extend(s, {3: 3, 4: 50}, {3: 9, 4: 9})


def encode_decode(s: Script) -> None:
    s.step(*(s.encode(s.open(), n) for n in (1, 16, 65, 130)))
    extend(s, (3, 1, 20, 2), 1, 1)


def overflow(s: Script) -> None:
    """In the middle of a step's rows: rows before them do not see them, rows behind them do."""
    extend(s, (5, 50), (17, 18))
    for uids in (act.uids for act in s.steps[-1] if isinstance(act, Compute)):
        s.infinite += [uids[9], uids[-1]]
    extend(s, 1)


def recipe(
    name: str, about: str, counters: list[str], of: str = "cached", steps: Sequence[Any] = ()
) -> Recipe:
    play: Any = (lambda s: extend(s, *steps)) if steps else globals()[name.replace("-", "_")]
    return Recipe(name, about, play, tuple(counters), APPLIES[of])


RECIPES = tuple(recipe(name, **entry) for name, entry in table("recipes.toml").items())


def write(recipe: Recipe, feature: Feature) -> Script:
    """The recipe's script for a feature; with an encoder, each request is encoded first, at odd
    lengths where the recipe gives none; a fork shares its parent's."""
    specs, device = feature.groups(16), device_class(feature.device.ops.machine)
    splits = [attention_order(device, spec.d_qk, spec.d_v).splits for spec in specs]
    script = Script(split=max(each.begin(1) for each in splits))
    recipe.play(script)
    if not feature.encode or script.encoder_uids:
        return script
    told, lengths = script.steps, cycle((33, 1, 64, 20, 65, 7, 16, 5))
    script.steps = []
    for step in told:
        fresh = [a for a in step if isinstance(a, Compute) and a.cached_len == 0]
        if fresh:
            script.step(*(script.encode(a.request, next(lengths)) for a in fresh))
        script.step(*step)
    for request, lineage in script.lineage.items():
        script.encoder_uids[request] = script.encoder_uids[lineage[-1]]
    return script
