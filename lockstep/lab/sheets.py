"""The tables of the matrix: recipes across, features down, and how a cell of each is judged.

One table is of attention alone: kinds of step on kinds of attention, played by `world`. The other
is of the whole engine: what may happen to a request, on tiny models, played by `rig`. A name of a
recipe belongs to one table. `cells` makes cells of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lockstep.attention import select
from lockstep.attention.base import Backend
from lockstep.lab import properties, stories
from lockstep.lab.features import FEATURES, Feature
from lockstep.lab.properties import Judgement
from lockstep.lab.recipes import RECIPES, Recipe
from lockstep.lab.stories import ENGINE_RECIPES, EngineRecipe
from lockstep.lab.tiny import MODELS, Tiny, loaded


@dataclass(frozen=True, eq=False)
class Sheet:
    """Recipes and features have a name and say what they are; `recipe.suits(feature)` tells which
    pairs are cells."""

    name: str
    column: str  # what a feature is called here
    measures: str  # what the error of a cell is the error of
    recipes: tuple[Any, ...]
    features: tuple[Any, ...]
    refusal: Callable[
        [Any, Any, Backend], str | None
    ]  # why a backend does not take a pair, by its own caps
    judge: Callable[
        [Any, Any, Backend, bool, bool], Judgement
    ]  # recipe, feature, backend, checks, quick

    def asked(self, feature: Any) -> list[Any]:
        """The recipes that make sense for a feature."""
        return [recipe for recipe in self.recipes if recipe.suits(feature)]


def attention_refusal(recipe: Recipe, feature: Feature, backend: Backend) -> str | None:
    """By the groups of the feature; a recipe with trees needs a backend that has tails."""
    tails = any(name.startswith("tail") for name in recipe.proves)
    return next(
        (w for g in feature.groups(16) if (w := select.refusal(backend.caps, g, "cpu", tails))),
        None,
    )


def engine_refusal(recipe: EngineRecipe, tiny: Tiny, backend: Backend) -> str | None:
    """An engine is asked for bits; a backend that promises none has its values judged in the other
    table."""
    if not backend.caps.invariances:
        return "it promises no bits, and what an engine must hold are equalities of bits"
    return next(
        (w for g in loaded(tiny).model.groups() if (w := select.refusal(backend.caps, g, "cpu"))),
        None,
    )


ATTENTION = Sheet(
    "attention", "feature", "the output", RECIPES, FEATURES, attention_refusal, properties.judge
)
ENGINE = Sheet(
    "engine", "model", "a log-probability", ENGINE_RECIPES, MODELS, engine_refusal, stories.judge
)
SHEETS = (ATTENTION, ENGINE)


def sheet_of(recipe: str) -> Sheet | None:
    """The table that has a recipe of this name."""
    return next((sheet for sheet in SHEETS if recipe in {r.name for r in sheet.recipes}), None)
