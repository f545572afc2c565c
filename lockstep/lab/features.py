"""What a model may ask of the attention layer: one feature each, as the groups of a small model.

Every feature has two layers per group with different scales, so that nothing may be remembered from
the layer before; a window feature has a full group beside it with pages of another size. Defaults
hide bugs: scales are not 1, caps bind, sinks are not 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lockstep.lab.options import Device
from lockstep.types import AttnSpec, GroupSpec, Layout

WINDOW = 20  # of the window features; recipes place their lengths around it


@dataclass(frozen=True)
class Feature:
    """`groups(page_size)`: the model. `decode` and `encode` say which groups a step of each kind
    runs."""

    name: str
    description: str
    groups: Callable[[int], tuple[GroupSpec, ...]]
    decode: tuple[int, ...] = (0,)
    encode: tuple[int, ...] = ()

    def on(self, device: Device) -> Feature:
        """The same model on a device."""
        return replace(self, groups=lambda page_size: device.specs(self.groups(page_size)))

    @property
    def fresh(self) -> bool:
        """No cache: whole requests only."""
        return all(g.layout is Layout.FRESH for g in self.groups(16))

    @property
    def window(self) -> int | None:
        """The window of the model, if it has one."""
        return next((g.window for g in self.groups(16) if g.window is not None), None)


def layers(heads: int, d: int, **extra: object) -> tuple[AttnSpec, ...]:
    """Two layers, the second a little sharper and with other scales."""
    first = AttnSpec(scale=1.5 / d**0.5, **extra)  # type: ignore[arg-type]
    if first.sinks is not None:
        first = replace(first, sinks=tuple(0.3 + 0.17 * h for h in range(heads)))
    second = replace(
        first,
        scale=first.scale * 1.25,
        k_scale=first.k_scale * 1.5,
        v_scale=first.v_scale * (1.5 if first.v_scale == first.k_scale else 0.75),
    )
    if second.sinks is not None:
        second = replace(second, sinks=tuple(-s for s in second.sinks))
    return first, second


def dense(
    heads: int, kv_heads: int, d: int, page_size: int, d_v: int | None = None, **extra: object
) -> GroupSpec:
    """A dense group; `extra` goes to its layers or, for window and kv_dtype, to the group."""
    group: dict[str, Any] = {k: extra.pop(k) for k in ("window", "kv_dtype") if k in extra}
    pair = layers(heads, d, **({"k_scale": 0.5, "v_scale": 2.0} | extra))
    return GroupSpec(Layout.DENSE, heads, kv_heads, d, d_v or d, pair, page_size, **group)


def latent(heads: int, d_qk: int, d_v: int, page_size: int, kv_dtype: str = "float32") -> GroupSpec:
    """An MLA group: one latent row per token."""
    return GroupSpec(
        Layout.LATENT,
        heads,
        1,
        d_qk,
        d_v,
        layers(heads, d_qk, k_scale=0.5, v_scale=0.5),
        page_size,
        kv_dtype,
    )


def fresh(
    heads: int, kv_heads: int, d_qk: int, d_v: int, causal: bool, window: int | None = None
) -> GroupSpec:
    """A group without a cache."""
    pair = tuple(replace(a, k_scale=1.0, v_scale=1.0) for a in layers(heads, d_qk))
    return GroupSpec(Layout.FRESH, heads, kv_heads, d_qk, d_v, pair, window=window, causal=causal)


def cross(heads: int, kv_heads: int, d: int, page_size: int) -> GroupSpec:
    """A decoder's view of its encoder."""
    return GroupSpec(
        Layout.CROSS,
        heads,
        kv_heads,
        d,
        d,
        layers(heads, d, k_scale=0.5, v_scale=2.0),
        page_size,
        causal=False,
    )


FEATURES = (
    Feature("dense", "GQA 4/2, head 32", lambda p: (dense(4, 2, 32, p),)),
    Feature("mha", "as many kv heads as heads", lambda p: (dense(3, 3, 16, p),)),
    Feature("group-7", "seven query heads per kv head, head 24", lambda p: (dense(14, 2, 24, p),)),
    Feature("heads-72", "more than 64 heads", lambda p: (dense(72, 2, 16, p),)),
    Feature("d-qk-v", "keys of 48, values of 32", lambda p: (dense(4, 2, 48, p, d_v=32),)),
    Feature(
        "window",
        "full and window groups, pages of two sizes",
        lambda p: (dense(4, 2, 32, p), dense(4, 2, 32, 2 * p, window=WINDOW)),
        (0, 1),
    ),
    Feature("soft-cap", "a cap that binds", lambda p: (dense(4, 2, 32, p, soft_cap=1.5),)),
    Feature("sinks", "one extra logit per head", lambda p: (dense(6, 2, 32, p, sinks=(0.0,) * 6),)),
    Feature("f16-kv", "float16 cache", lambda p: (dense(4, 2, 32, p, kv_dtype="float16"),)),
    Feature("bf16-kv", "bfloat16 cache", lambda p: (dense(4, 2, 32, p, kv_dtype="bfloat16"),)),
    Feature(
        "fp8-kv",
        "float8 cache with scales at which its range binds",
        lambda p: (dense(4, 2, 32, p, kv_dtype="float8_e4m3", k_scale=0.005, v_scale=0.004),),
    ),
    Feature("latent", "MLA, rank 32 + rope 8", lambda p: (latent(6, 40, 32, p),)),
    Feature(
        "latent-wide", "MLA wider than 256: the other tile", lambda p: (latent(3, 288, 256, p),)
    ),
    Feature("latent-bf16", "MLA in bfloat16", lambda p: (latent(6, 40, 32, p, "bfloat16"),)),
    Feature(
        "window-sinks",
        "window, sinks, soft cap and a float8 cache at once",
        lambda p: (
            dense(6, 2, 32, p, sinks=(0.0,) * 6),
            dense(
                6,
                2,
                32,
                p,
                window=WINDOW,
                soft_cap=2.0,
                sinks=(0.0,) * 6,
                kv_dtype="float8_e4m3",
                k_scale=0.02,
            ),
        ),
        (0, 1),
    ),
    Feature(
        "cross",
        "encoder and decoder",
        lambda p: (dense(4, 2, 32, p), cross(4, 2, 32, p), fresh(4, 2, 32, 32, causal=False)),
        (0, 1),
        (2, 1),
    ),
    Feature("head-20", "a head size that is no multiple of 8", lambda p: (dense(4, 2, 20, p),)),
    Feature(
        "latent-22",
        "MLA, rank 22 + rope 8: values end in the middle of a padded vector",
        lambda p: (latent(6, 30, 22, p),),
    ),
    Feature(
        "encoder",
        "no cache, every row sees every key",
        lambda p: (fresh(4, 2, 32, 32, causal=False),),
    ),
    Feature("embed", "no cache, causal", lambda p: (fresh(4, 2, 32, 32, causal=True),)),
    Feature(
        "embed-window",
        "no cache, a window",
        lambda p: (fresh(4, 2, 32, 32, causal=True, window=WINDOW),),
    ),
    Feature(
        "embed-20",
        "no cache, a head size that is no multiple of 8",
        lambda p: (fresh(4, 2, 20, 20, causal=True),),
    ),
    Feature("embed-latent", "no cache, MLA", lambda p: (fresh(6, 1, 40, 32, causal=True),)),
)
