"""The tables of the matrix: recipes across, features down, and how a cell of each is judged.

One table is of attention alone: kinds of step on kinds of attention, played by
`attention_harness`. The other is of the whole engine: what may happen to a request, on tiny models,
played by `engine_harness`. A name of a recipe belongs to one table. `cells` makes cells of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from lockstep.attention import select
from lockstep.attention.base import Backend
from lockstep.lab import (
    engine_harness,
    engine_recipes,
    option_recipes,
    properties,
    sampler_recipes,
    speculative_recipes,
)
from lockstep.lab.features import FEATURES, GPU_FEATURES, Feature
from lockstep.lab.options import Device, RunOptions
from lockstep.lab.properties import Judgement
from lockstep.lab.recipes import RECIPES, Recipe
from lockstep.lab.tiny import MODELS, Tiny, loaded
from lockstep.types import GroupSpec


@dataclass(frozen=True, eq=False)
class MatrixTable:
    """Recipes and features have a name and a description; `recipe.applies_to(feature)` tells which
    pairs are cells."""

    name: str
    column: str  # what a feature is called here
    measures: str  # what the error of a cell is the error of
    recipes: tuple[Any, ...]
    features: tuple[Any, ...]
    # of a recipe, a feature and a backend: why it does not take them, by its caps; what is found
    refusal: Callable[[Any, Any, Backend, Device], str | None]
    judge: Callable[[Any, Any, Backend, RunOptions], Judgement]
    gpu_features: tuple[Any, ...] = ()

    def features_of(self, device: Device) -> tuple[Any, ...]:
        """Those that a device is asked for."""
        return (*self.features, *self.gpu_features) if device.name == "cuda" else self.features

    @property
    def every_feature(self) -> tuple[Any, ...]:
        """On any device."""
        return (*self.features, *self.gpu_features)

    def asked(self, feature: Any) -> list[Any]:
        """The recipes that make sense for a feature."""
        return [recipe for recipe in self.recipes if recipe.applies_to(feature)]


def attention_refusal(
    recipe: Recipe, feature: Feature, backend: Backend, device: Device
) -> str | None:
    """By the groups of the feature; a recipe with trees needs a backend that has tails."""
    tails = any(name.startswith("tail") for name in recipe.required_counters)
    return group_refusal(backend, feature.on(device).groups(16), device, tails)


def engine_refusal(recipe: Recipe, tiny: Tiny, backend: Backend, device: Device) -> str | None:
    """An engine is asked for bits; who promises none has its values judged in the other table."""
    if not backend.caps.invariances:
        return "it promises no bits, and what an engine must hold are equalities of bits"
    groups = loaded(tiny, device).model.groups(kv_dtype=device.dtype)
    return group_refusal(backend, groups, device)


def group_refusal(
    backend: Backend, groups: Iterable[GroupSpec], device: Device, tails: bool = False
) -> str | None:
    """The first reason why a backend cannot serve some group of a model."""
    reasons = (
        select.refusal(backend.caps, group, device.place.type, tails, device.dtype)
        for group in groups
    )
    return next(filter(None, reasons), None)


ENGINE_RECIPES = (
    *(*engine_recipes.HISTORIES, *option_recipes.OPTIONS, *engine_recipes.SURROUNDINGS),
    *(*option_recipes.CAPACITIES, *sampler_recipes.RECIPES, *speculative_recipes.SPECULATIVE),
)
ATTENTION = MatrixTable(
    "attention",
    "feature",
    "the output",
    RECIPES,
    FEATURES,
    attention_refusal,
    properties.judge,
    gpu_features=GPU_FEATURES,
)
ENGINE = MatrixTable(
    "engine",
    "model",
    "a log-probability",
    ENGINE_RECIPES,
    MODELS,
    engine_refusal,
    engine_harness.judge,
)
TABLES = (ATTENTION, ENGINE)


def table_of(recipe: str) -> MatrixTable | None:
    return next((table for table in TABLES if recipe in {r.name for r in table.recipes}), None)
