"""Which backend, and why: decided once, by what the model needs and what a backend says it can do.

A backend is `lockstep/attention/<name>.py`, or an entry point of the group `lockstep.backends` in somebody else's package. A library
that cannot be imported is a reason that is shown, never swallowed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import entry_points
from pathlib import Path

from lockstep.attention.base import Backend, Caps
from lockstep.types import GroupSpec, Layout, Refused, RuleError

HELPERS = ("base", "select")  # files of this folder that are no backend
ENTRY_POINTS = "lockstep.backends"


def names() -> list[str]:
    """Every backend that can be asked for by name, the project's own first, the reference last of these."""
    own = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in HELPERS]
    return [*sorted(own, key=lambda n: (n == "reference", n)), *sorted({e.name for e in entry_points(group=ENTRY_POINTS)} - set(own))]


def load(name: str) -> Backend:
    """The backend called `name`; one that is there and cannot be made is an error with its reason."""
    try:
        return _load(name)
    except RuleError:
        raise
    except Exception as error:  # whatever somebody's import or constructor raises
        got = f"{type(error).__name__}: {error}"
        raise Refused(f"backend {name} can be loaded", got, "Install what it needs, or use another") from error


def _load(name: str) -> Backend:
    if name in names() and not any(e.name == name for e in entry_points(group=ENTRY_POINTS)):
        backend: Backend = importlib.import_module(f"lockstep.attention.{name}").Backend()
        return backend
    found = [e for e in entry_points(group=ENTRY_POINTS) if e.name == name]
    if not found:
        close = get_close_matches(name, names(), 1)
        hint = f"Did you mean {close[0]}?" if close else "Install the package that has it"
        raise RuleError(f"a backend is one of {', '.join(names())}", repr(name), hint)
    made: Backend = found[0].load()()
    return made


def select(name: str | None, specs: Sequence[GroupSpec], device: str) -> tuple[Backend, str]:
    """The backend for a model on a device, and the reason in words. `name` None takes the first that can do everything."""
    if name is not None:
        backend = load(name)
        for spec in specs:
            why = refusal(backend.caps, spec, device)
            if why is not None:
                raise Refused(f"backend {name} can do what the model needs", why, f"Use one of {', '.join(names())}")
        return backend, f"{name}: asked for by name"
    passed_over: list[str] = []
    for candidate in names():
        try:
            backend = load(candidate)
        except Refused as error:
            passed_over.append(f"not {candidate}: {error.got}")
            continue
        whys = [why for spec in specs if (why := refusal(backend.caps, spec, device))]
        if not whys:
            because = f" ({'; '.join(passed_over)})" if passed_over else ""
            return backend, f"{candidate}: the first that can do all {len(specs)} groups on {device}{because}"
        passed_over.append(f"not {candidate}: {whys[0]}")
    raise Refused(f"some backend can do what the model needs on {device}", "; ".join(passed_over), "Change the model or the device")


def refusal(caps: Caps, spec: GroupSpec, device: str, tails: bool = False) -> str | None:
    """Why a backend cannot serve a group, or None. `tails`: the steps hold tree rows."""
    for head in (spec.d_qk, spec.d_v):
        if head % caps.head_multiple or head > caps.head_max:
            return f"head size {head} is not a multiple of {caps.head_multiple} up to {caps.head_max}"
    capped = any(a.soft_cap is not None for a in spec.layers)
    sinks = any(a.sinks is not None for a in spec.layers)
    paged = spec.layout is not Layout.FRESH
    rules = (
        (device in caps.devices, f"device {device} is not one of {_list(caps.devices)}"),
        (spec.layout in caps.layouts, f"layout {spec.layout} is not one of {_list(caps.layouts)}"),
        (spec.kv_dtype in caps.kv_dtypes, f"kv_dtype {spec.kv_dtype} is not one of {_list(caps.kv_dtypes)}"),
        (caps.page_sizes is None or not paged or spec.page_size in caps.page_sizes, f"page size {spec.page_size} is not supported"),
        (caps.window or spec.window is None, f"window {spec.window}: sliding windows are not supported"),
        (caps.non_causal or spec.causal, "attention that is not causal is not supported"),
        (caps.soft_cap or not capped, "soft caps are not supported"),
        (caps.sinks or not sinks, "sinks are not supported"),
        (caps.tails or not tails, "tree rows are not supported"),
    )
    return next((why for holds, why in rules if not holds), None)


def _list(items: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(items))
