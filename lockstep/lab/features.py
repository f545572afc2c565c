"""Features: what a model may require of attention. Each entry of features.toml becomes the groups
of a small model. Default values hide bugs, so scales are not 1, caps bind, sinks are not 0, and the
two layers of a group differ: nothing may be reused from the layer before."""

from dataclasses import dataclass, replace
from typing import Any

from lockstep.lab import table
from lockstep.lab.options import CPU, Device
from lockstep.types import AttnSpec, GroupSpec, Layout


@dataclass(frozen=True)
class Feature:
    """A small model's groups; `decode` and `encode` list those that a step of that kind runs."""

    name: str
    description: str
    made_of: tuple[GroupSpec, ...]  # here page_size is a multiple of the harness's
    decode: tuple[int, ...] = (0,)
    encode: tuple[int, ...] = ()
    device: Device = CPU

    def groups(self, page_size: int) -> tuple[GroupSpec, ...]:
        sized = (replace(spec, page_size=page_size * spec.page_size) for spec in self.made_of)
        return self.device.specs(tuple(sized))

    def on(self, device: Device) -> "Feature":
        return replace(self, device=device)

    @property
    def fresh(self) -> bool:
        """Whether nothing is cached: every request is computed whole."""
        return all(g.layout is Layout.FRESH for g in self.groups(16))


def group(sizes: list[int], layout: str = "dense", pages: int = 1, **extra: Any) -> GroupSpec:
    """Returns a group of two layers, the second sharper and with other scales. Its pages are
    `pages` times the harness's page size; `extra` holds fields of the group or its layers."""
    kept, (heads, kv_heads, d_qk) = Layout(layout), sizes[:3]
    own = {k: extra.pop(k) for k in ("window", "kv_dtype", "causal") if k in extra}
    if "sinks" in extra:
        extra["sinks"] = tuple(0.3 + 0.17 * h for h in range(heads))
    scales = {"k_scale": 0.5, "v_scale": 0.5 if kept is Layout.LATENT else 2.0}
    first = AttnSpec(scale=1.5 / d_qk**0.5, **(scales | extra))
    second = replace(
        first,
        scale=first.scale * 1.25,
        k_scale=first.k_scale * 1.5,
        v_scale=first.v_scale * (1.5 if first.v_scale == first.k_scale else 0.75),
        sinks=first.sinks and tuple(-s for s in first.sinks),
    )
    pair: tuple[AttnSpec, ...] = (first, second)
    if kept is Layout.FRESH:
        pair = tuple(replace(layer, k_scale=1.0, v_scale=1.0) for layer in pair)
    return GroupSpec(kept, heads, kv_heads, d_qk, sizes[-1], pair, pages, **own)


def feature(name: str, about: str, groups: list[dict[str, Any]], **steps: list[int]) -> Feature:
    """Returns the feature of one line of the table."""
    made_of = tuple(group(**words) for words in groups)
    decode, encode = steps.get("decode", range(len(groups))), steps.get("encode", ())
    return Feature(name, about, made_of, tuple(decode), tuple(encode))


TABLE = table("features.toml")
FEATURES, GPU_FEATURES = (
    tuple(feature(name, **line) for name, line in TABLE[part].items())
    for part in ("features", "gpu_features")
)
WINDOW: int = TABLE["features"]["window"]["groups"][1]["window"]  # recipes place lengths around it
