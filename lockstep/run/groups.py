"""The KV groups of a model, numbered once: those that steps of each kind use, by number.

A generating step has the model's groups; an embedding step the same layers without a cache; an
encode step the encoder's layers, fresh, and the cross groups that a generating step reads: the same
numbers, hence the same pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from lockstep.models.weights import Info
from lockstep.nn.decoder import EncoderDecoder, Model
from lockstep.types import GroupSpec, Layout


def encoder_of(model: Model, info: Info) -> EncoderDecoder | None:
    """The model again, as one that has an encoder, if it has one."""
    return cast(EncoderDecoder, model) if info.encoder else None


@dataclass(frozen=True)
class Groups:
    """`specs` of all groups, cached ones first; the others name some of them."""

    specs: tuple[GroupSpec, ...]
    cached: int
    generate: tuple[int, ...]
    encode: tuple[int, ...] = ()
    embed: tuple[int, ...] = ()

    @staticmethod
    def of(
        model: Model, encoder: EncoderDecoder | None, page_size: int = 16, kv_dtype: str = "float32"
    ) -> Groups:
        """A model's; `encoder` is what `encoder_of` says."""
        cached = model.groups(page_size, kv_dtype)
        first = tuple(range(len(cached)))
        if encoder is None:
            fresh = model.fresh_groups()
            return Groups(
                (*cached, *fresh),
                len(cached),
                first,
                (),
                tuple(range(len(cached), len(cached) + len(fresh))),
            )
        wanted = encoder.encoder_groups(page_size, kv_dtype)
        fresh = tuple(spec for spec in wanted if spec.layout is Layout.FRESH)
        specs = (*cached, *fresh)
        return Groups(specs, len(cached), first, tuple(specs.index(spec) for spec in wanted))
