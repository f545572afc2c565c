"""Recipes: the columns of both tables, and the scripts of the attention's, which stand in
recipes.toml.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from lockstep.lab import table
from lockstep.lab.features import WINDOW, Feature
from lockstep.lab.script import Act, Compute, Drop, Script
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


# of a step; one without any is new rows alone
VERBS = {"all", "drop", "encode", "fork", "again", "accept", "tree"}
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


def play(s: Script, steps: Sequence[Any]) -> None:
    """Steps as recipes.toml has them."""
    for step in steps:
        told = step if isinstance(step, dict) and VERBS & set(step) else {"all": step}
        acts: list[Act] = [Drop(r) for r in told.get("drop", ())]
        acts += [s.encode(s.open(), n) for n in told.get("encode", ())]
        acts += [s.fork(r) for r in told.get("fork", ())]
        acts += [s.again(int(r), n) for r, n in told.get("again", {}).items()]
        for r in list(s.trees) if "accept" in told else ():
            acts.append(s.accept(r, tuple(told["accept"])))
        trees = told.get("tree", ())
        if trees and isinstance(trees[0], int):
            trees = [trees] * len(s.committed)
        acts += [s.tree(r, tuple(parents), told.get("new")) for r, parents in enumerate(trees)]
        s.step(*acts, *new_rows(s, told.get("all", ()), told))


def new_rows(s: Script, counts: Any, told: Mapping[str, Any]) -> list[Compute]:
    """New rows of requests; those that are not there yet are opened."""
    if isinstance(counts, int | str):
        counts = dict.fromkeys(s.committed, counts)
    elif not isinstance(counts, dict):
        counts = dict(enumerate(counts))
    acts, named = list[Compute](), {"split": s.split, "window": WINDOW}
    for at, (request, count) in enumerate(counts.items()):
        while len(s.committed) <= int(request):
            s.open()
        keep = told["keep"][at] if "keep" in told else None
        emit = tuple(told["emit"][at]) if "emit" in told else None
        n = sum(named.get(term) or int(term) for term in str(count).split())
        acts.append(s.extend(int(request), n, keep, emit))
        s.infinite += [acts[-1].uids[i] for i in told.get("infinite", ())]
    return acts


def recipe(
    name: str, about: str, counters: list[str], steps: Sequence[Any], of: str = "cached"
) -> Recipe:
    return Recipe(name, about, partial(play, steps=steps), tuple(counters), APPLIES[of])


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
