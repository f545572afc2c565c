"""Chooses the backend, once and with a reason, by what the model needs and what `Caps` state.

A backend is `lockstep/attention/<name>.py`, or an entry point of the group `lockstep.backends` in
another package. Unless one is named, only backends that promise bits are considered. A failed
import is part of the reason that is shown."""

import pkgutil
from collections.abc import Sequence
from pathlib import Path

from lockstep.attention.base import Backend, Caps
from lockstep.order import stored_len
from lockstep.plugins import Plugins
from lockstep.types import Choice, GroupSpec, Layout, Refused

HELPERS = ("base", "select")  # files of this folder that are not backends
BY_NAME = 'Ask for attention_backend="reference" by name: accurate, not bit-identical, slow'
FILES = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])]
OWN = sorted(set(FILES) - set(HELPERS), key=lambda name: (name == "reference", name))
BACKENDS = Plugins(
    kind="backend",
    group="lockstep.backends",
    attribute="Backend",
    own={name: f"lockstep.attention.{name}" for name in OWN},
    protocol=Backend,
)
names, load = BACKENDS.names, BACKENDS.make


def select(
    name: str | None, specs: Sequence[GroupSpec], device: str, dtype: str = "float32"
) -> tuple[Backend, Choice]:
    """Returns the backend for a model on a torch device, with activations of `dtype`, and the
    reason. `name` None takes the first backend that promises bits and can serve all `specs`."""
    if name is not None:
        backend = load(name)
        for spec in specs:
            why = refusal(backend.caps, spec, device, dtype=dtype)
            if why is not None:
                rule = f"backend {name} can do what the model needs"
                others = ", ".join(other for other in names() if other != name)
                raise Refused(rule, why, f"Ask for another: {others}")
        return backend, Choice(name, "asked for by name")
    passed_over: list[str] = []
    for candidate in names():
        try:
            backend = load(candidate)
        except Refused as error:
            passed_over.append(f"not {candidate}: {error.got}")
            continue
        refusals = (refusal(backend.caps, spec, device, dtype=dtype) for spec in specs)
        why = next(filter(None, refusals), None)
        if backend.caps.order != "canonical":
            why = "it does not promise bit-identical results"
        if why is None:
            because = f" ({'; '.join(passed_over)})" if passed_over else ""
            reason = f"the first that can do all {len(specs)} groups on {device}{because}"
            return backend, Choice(candidate, reason)
        passed_over.append(f"not {candidate}: {why}")
    rule = f"a backend with bit-identical results can do what the model needs on {device}"
    raise Refused(rule, "; ".join(passed_over), BY_NAME)


def refusal(
    caps: Caps, spec: GroupSpec, device: str, tails: bool = False, dtype: str = "float32"
) -> str | None:
    """Returns why a backend cannot serve a group, or None. `tails`: steps may have tree rows."""
    for head in (spec.d_qk, spec.d_v):
        stored = stored_len(head)
        if stored % caps.head_multiple or stored > caps.head_max:
            shown = f"{head}" if stored == head else f"{head}, stored as {stored},"
            limits = f"a multiple of {caps.head_multiple} up to {caps.head_max}"
            return f"head size {shown} is not {limits}"
    paged = spec.layout is not Layout.FRESH
    stated = (
        (device, caps.devices, f"device {device} is"),
        (dtype, caps.activation_dtypes, f"activations of {dtype} are"),
        (spec.layout, caps.layouts, f"layout {spec.layout} is"),
        (spec.kv_dtype if paged else None, caps.kv_dtypes, f"kv_dtype {spec.kv_dtype} is"),
    )
    for value, known, what in stated:
        if value is not None and value not in known:
            return f"{what} not one of {', '.join(sorted(known)) or 'none that it states'}"
    capped = any(a.soft_cap is not None for a in spec.layers)
    sinks = any(a.sinks is not None for a in spec.layers)
    any_size = caps.page_sizes is None or not paged
    rules = (
        (any_size or spec.page_size in (caps.page_sizes or ()), f"page size {spec.page_size} is"),
        (caps.window or spec.window is None, f"window {spec.window}: sliding windows are"),
        (caps.non_causal or spec.causal, "attention that is not causal is"),
        (caps.soft_cap or not capped, "soft caps are"),
        (caps.sinks or not sinks, "sinks are"),
        (caps.tails or not tails, "tree rows are"),
    )
    return next((f"{what} not supported" for holds, what in rules if not holds), None)
