"""What a model may ask of the attention layer: one feature each, as the groups of a small model.

Every feature has two layers per group with different scales, so that nothing may be remembered from
the layer before; a window feature has a full group beside it with pages of another size. Defaults
hide bugs: scales are not 1, caps bind, sinks are not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from lockstep.lab.options import CPU, Device
from lockstep.types import AttnSpec, GroupSpec, Layout

WINDOW = 20  # of the window features; recipes place their lengths around it


Group = Callable[[int], GroupSpec]  # of a page size


@dataclass(frozen=True)
class Feature:
    """`decode` and `encode` say which groups a step of each kind runs."""

    name: str
    description: str
    made_of: tuple[Group, ...]
    decode: tuple[int, ...] = (0,)
    encode: tuple[int, ...] = ()
    device: Device = CPU

    def groups(self, page_size: int) -> tuple[GroupSpec, ...]:
        return self.device.specs(tuple(group(page_size) for group in self.made_of))

    def on(self, device: Device) -> Feature:
        return replace(self, device=device)

    @property
    def fresh(self) -> bool:
        """No cache: whole requests only."""
        return all(g.layout is Layout.FRESH for g in self.groups(16))

    @property
    def window(self) -> int | None:
        return next((g.window for g in self.groups(16) if g.window is not None), None)


def layers(heads: int, d: int, **extra: Any) -> tuple[AttnSpec, ...]:
    """Two layers, the second a little sharper and with other scales."""
    if "sinks" in extra:
        extra["sinks"] = tuple(0.3 + 0.17 * h for h in range(heads))
    first = AttnSpec(scale=1.5 / d**0.5, **extra)
    return first, replace(
        first,
        scale=first.scale * 1.25,
        k_scale=first.k_scale * 1.5,
        v_scale=first.v_scale * (1.5 if first.v_scale == first.k_scale else 0.75),
        sinks=first.sinks and tuple(-s for s in first.sinks),
    )


def group(
    layout: Layout,
    heads: int,
    kv_heads: int,
    d_qk: int,
    d_v: int | None = None,
    pages: int = 1,
    **extra: Any,
) -> Group:
    """A group, its pages `pages` times as large as others; `extra` goes to it or to its layers."""
    own = {k: extra.pop(k) for k in ("window", "kv_dtype", "causal") if k in extra}
    scales = {"k_scale": 0.5, "v_scale": 0.5 if layout is Layout.LATENT else 2.0}
    pair = layers(heads, d_qk, **(scales | extra))
    if layout is Layout.FRESH:
        pair = tuple(replace(layer, k_scale=1.0, v_scale=1.0) for layer in pair)

    def make(page_size: int) -> GroupSpec:
        size = 16 if layout is Layout.FRESH else pages * page_size
        return GroupSpec(layout, heads, kv_heads, d_qk, d_v or d_qk, pair, size, **own)

    return make


dense, latent = partial(group, Layout.DENSE), partial(group, Layout.LATENT)
fresh, cross = partial(group, Layout.FRESH), partial(group, Layout.CROSS, causal=False)
FP8 = "float8_e4m3"
CAPPED: dict[str, Any] = {"soft_cap": 2.0, "kv_dtype": FP8, "k_scale": 0.02}

FEATURES = (
    Feature("dense", "GQA 4/2, head 32", (dense(4, 2, 32),)),
    Feature("mha", "as many kv heads as heads", (dense(3, 3, 16),)),
    Feature("group-7", "seven query heads per kv head, head 24", (dense(14, 2, 24),)),
    Feature("heads-72", "more than 64 heads", (dense(72, 2, 16),)),
    Feature("d-qk-v", "keys of 48, values of 32", (dense(4, 2, 48, 32),)),
    Feature(
        "window",
        "full and window groups, pages of two sizes",
        (dense(4, 2, 32), dense(4, 2, 32, pages=2, window=WINDOW)),
        decode=(0, 1),
    ),
    Feature("soft-cap", "a cap that binds", (dense(4, 2, 32, soft_cap=1.5),)),
    Feature("sinks", "one extra logit per head", (dense(6, 2, 32, sinks=True),)),
    Feature("f16-kv", "float16 cache", (dense(4, 2, 32, kv_dtype="float16"),)),
    Feature("bf16-kv", "bfloat16 cache", (dense(4, 2, 32, kv_dtype="bfloat16"),)),
    Feature(
        "fp8-kv",
        "float8 cache with scales at which its range binds",
        (dense(4, 2, 32, kv_dtype=FP8, k_scale=0.005, v_scale=0.004),),
    ),
    Feature("latent", "MLA, rank 32 + rope 8", (latent(6, 1, 40, 32),)),
    Feature("latent-wide", "MLA wider than 256: the other tile", (latent(3, 1, 288, 256),)),
    Feature("latent-bf16", "MLA in bfloat16", (latent(6, 1, 40, 32, kv_dtype="bfloat16"),)),
    Feature(
        "window-sinks",
        "window, sinks, soft cap and a float8 cache at once",
        (dense(6, 2, 32, sinks=True), dense(6, 2, 32, **CAPPED, window=WINDOW, sinks=True)),
        decode=(0, 1),
    ),
    Feature(
        "cross",
        "encoder and decoder",
        (dense(4, 2, 32), cross(4, 2, 32), fresh(4, 2, 32, causal=False)),
        decode=(0, 1),
        encode=(2, 1),
    ),
    Feature("head-20", "a head size that is no multiple of 8", (dense(4, 2, 20),)),
    Feature(
        "latent-22",
        "MLA, rank 22 + rope 8: values end in the middle of a padded vector",
        (latent(6, 1, 30, 22),),
    ),
    Feature("encoder", "no cache, every row sees every key", (fresh(4, 2, 32, causal=False),)),
    Feature("embed", "no cache, causal", (fresh(4, 2, 32),)),
    Feature("embed-window", "no cache, a window", (fresh(4, 2, 32, window=WINDOW),)),
    Feature("embed-20", "no cache, a head size that is no multiple of 8", (fresh(4, 2, 20),)),
    Feature("embed-latent", "no cache, MLA", (fresh(6, 1, 40, 32),)),
)
# of models that a GPU serves; besides, on such a device
GPU_FEATURES = (
    Feature("head-64", "GQA 8/2, head 64", (dense(8, 2, 64),)),
    Feature("head-128", "GQA 8/2, head 128", (dense(8, 2, 128),)),
    Feature("head-256", "GQA 4/2, head 256", (dense(4, 2, 256),)),
    Feature("d-192-128", "keys of 192, values of 128", (dense(4, 4, 192, 128),)),
    Feature("latent-576", "MLA, rank 512 + rope 64", (latent(16, 1, 576, 512),)),
)
