"""The kinds of step that a model has: frozen values, made once, told apart by name.

An embedding step has the layers of a generating one and caches nothing; an encode step has the
encoder's layers and the cross groups that a generating step reads. Groups are numbered over all
models of an engine. The engine makes the kinds; the scheduler puts one into every step. No torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from lockstep.types import GroupSpec, Layout, RuleError

if TYPE_CHECKING:
    from lockstep.models.bart import Bart
    from lockstep.nn.attention import GroupLayer
    from lockstep.nn.decoder import Decoder, Model

GENERATE, ENCODE, EMBED = "generate", "encode", "embed"
DRAFT, EXTEND = DRAFTS = "draft", "draft-extend"  # a draft model's: draft tokens; known tokens
VERIFY = "verify"  # a generating step that samples several rows of every request


@dataclass(frozen=True, eq=False)
class StepKind:
    """A kind of step of one model."""

    name: str
    model: "Model"
    groups: tuple[int, ...]  # their numbers in the engine's tables
    specs: tuple[GroupSpec, ...]  # of these groups
    layer_map: "tuple[GroupLayer, ...]"  # attention layer → (index in `groups`, layer in it)
    forward: Callable[..., Any]  # ids [T], positions [T], lowered step → hidden [T, d]
    # after these layers `forward`, which is passed them, also returns the residual, [T, d] each
    hidden_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.groups) != len(self.specs):
            rule = "a kind of step has one spec per group"
            got = f"groups {self.groups} and {len(self.specs)} specs"
            raise RuleError(rule, got, "Name each group once")


Kinds = dict[str, StepKind]  # of one engine, by name


def kinds_of(
    model: "Model",
    page_size: int = 16,
    kv_dtype: str = "float32",
    first_group: int = 0,
    hidden_layers: tuple[int, ...] = (),
) -> Kinds:
    """Returns a model's kinds by name; its groups are numbered from `first_group`, cached first."""
    made: list[tuple[str, tuple[GroupSpec, ...], tuple[GroupLayer, ...], Callable[..., Any]]] = []
    if model.generates:
        forward = cast("Decoder", model).hidden_states if hidden_layers else model
        made.append((GENERATE, model.groups(page_size, kv_dtype), model.layer_map, forward))
    if model.encodes:
        encoder = cast("Bart", model)
        made.append((ENCODE, *encoder.encoder_groups(page_size, kv_dtype), encoder.encode))
    else:
        fresh = tuple(replace(group, layout=Layout.FRESH) for group in model.groups())
        made.append((EMBED, fresh, model.layer_map, model))
    number: dict[GroupSpec, int] = {}
    return {
        name: StepKind(
            name=name,
            model=model,
            groups=tuple(number.setdefault(each, first_group + len(number)) for each in specs),
            specs=specs,
            layer_map=layer_map,
            forward=forward,
            hidden_layers=hidden_layers if name == GENERATE else (),
        )
        for name, specs, layer_map, forward in made
    }


def group_specs(kinds: Iterable[StepKind]) -> tuple[GroupSpec, ...]:
    """Returns the specs of all groups that these kinds use, in the order of their numbers."""
    found = {g: spec for kind in kinds for g, spec in zip(kind.groups, kind.specs, strict=True)}
    if sorted(found) != list(range(len(found))):
        rule = "the groups of an engine are numbered without gaps"
        raise RuleError(rule, f"{sorted(found)}", "Number it after the first's groups")
    return tuple(found[g] for g in range(len(found)))
