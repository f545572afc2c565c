"""Which backend, and why: decided once, by what the model needs and what a backend says it can do.

A backend is `lockstep/attention/<name>.py`, or an entry point of the group `lockstep.backends` in
somebody else's package; a name has one owner, and a second one is an error. Left to choose, only
backends that promise bits are considered. A library that cannot be imported is a reason that is
shown, never swallowed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

from lockstep.attention.base import Backend, Caps
from lockstep.order import stored_len
from lockstep.types import GroupSpec, Layout, Refused, RuleError

HELPERS = ("base", "select")  # files of this folder that are no backend
ENTRY_POINTS = "lockstep.backends"
BY_NAME = (
    'Ask for attention_backend="reference" by name: right values, no promise of bits, and slow'
)


def names() -> list[str]:
    """Every backend that can be asked for by name, the project's own first, the reference last of
    these."""
    own = _own()
    return [*sorted(own, key=lambda name: (name == "reference", name)), *sorted(_outside())]


def load(name: str) -> Backend:
    """The backend called `name`; one that is there and cannot be made is an error with its
    reason."""
    try:
        return _load(name)
    except RuleError:
        raise
    except Exception as error:  # whatever somebody's import or constructor raises
        got = f"{type(error).__name__}: {error}"
        raise Refused(
            f"backend {name} can be loaded", got, "Install what it needs, or use another"
        ) from error


def _load(name: str) -> Backend:
    outside = _outside()
    if name in outside:
        made: Backend = outside[name].load()()
        return made
    if name in _own():
        backend: Backend = importlib.import_module(f"lockstep.attention.{name}").Backend()
        return backend
    close = get_close_matches(name, names(), 1)
    hint = f"Did you mean {close[0]}?" if close else "Install the package that has it"
    raise RuleError(f"a backend is one of {', '.join(names())}", repr(name), hint)


def origin(name: str) -> str:
    """Who wrote the backend called `name`: "" for our own, else the distribution and its version,
    for the fingerprint."""
    entry = _outside().get(name)
    return "" if entry is None else _distribution(entry)


def _own() -> list[str]:
    """The files of this folder that are backends."""
    return [
        m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name not in HELPERS
    ]


def _outside() -> dict[str, EntryPoint]:
    """Other packages' backends by name. A name that somebody else has too is an error: neither may
    take the other's place."""
    found: dict[str, EntryPoint] = {}
    for entry in sorted(
        entry_points(group=ENTRY_POINTS), key=lambda e: (e.name, e.value, _distribution(e))
    ):
        if entry.name in _own():
            _clash(entry, f"lockstep's own lockstep.attention.{entry.name}")
        first = found.setdefault(entry.name, entry)
        if (first.value, _distribution(first)) != (entry.value, _distribution(entry)):
            _clash(entry, f"{first.value} of {_distribution(first)}")
    return found


def _clash(entry: EntryPoint, other: str) -> None:
    rule = f"one backend is called {entry.name}"
    got = f"{entry.value} of {_distribution(entry)}, and {other}"
    raise RuleError(rule, got, "Uninstall one of the packages, or rename its entry point")


def _distribution(entry: EntryPoint) -> str:
    return "an unknown package" if entry.dist is None else f"{entry.dist.name}-{entry.dist.version}"


def select(
    name: str | None, specs: Sequence[GroupSpec], device: str, dtype: str = "float32"
) -> tuple[Backend, str]:
    """The backend for a model on a device, with activations of `dtype`, and the reason in words.

    `name` None takes the first that promises bits and can do everything; one that promises none is
    asked for by name or not used.
    """
    if name is not None:
        backend = load(name)
        for spec in specs:
            why = refusal(backend.caps, spec, device, dtype=dtype)
            if why is not None:
                raise Refused(f"backend {name} can do what the model needs", why, _remedy(name))
        return backend, f"{name}: asked for by name"
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
            why = "it promises no bits"
        if why is None:
            because = f" ({'; '.join(passed_over)})" if passed_over else ""
            return (
                backend,
                f"{candidate}: the first that can do all {len(specs)} groups on {device}{because}",
            )
        passed_over.append(f"not {candidate}: {why}")
    raise Refused(
        f"some backend that promises bits can do what the model needs on {device}",
        "; ".join(passed_over),
        BY_NAME,
    )


def _remedy(name: str) -> str:
    """What to do about a backend that was asked for and cannot."""
    others = [other for other in names() if other != name]
    return f"Ask for another: {', '.join(others)}" if others else "Install another"


def refusal(
    caps: Caps, spec: GroupSpec, device: str, tails: bool = False, dtype: str = "float32"
) -> str | None:
    """Why a backend cannot serve a group, or None. `tails`: the steps hold tree rows; `dtype`: of
    queries."""
    for head in (spec.d_qk, spec.d_v):
        stored = stored_len(head)
        if stored % caps.head_multiple or stored > caps.head_max:
            shown = f"{head}" if stored == head else f"{head}, stored as {stored},"
            return (
                f"head size {shown} is not a multiple of {caps.head_multiple} up to {caps.head_max}"
            )
    capped = any(a.soft_cap is not None for a in spec.layers)
    sinks = any(a.sinks is not None for a in spec.layers)
    paged = spec.layout is not Layout.FRESH
    rules = (
        (device in caps.devices, f"device {device} is not one of {_list(caps.devices)}"),
        (
            dtype in caps.activation_dtypes,
            f"activations of {dtype} are not one of {_list(caps.activation_dtypes)}",
        ),
        (spec.layout in caps.layouts, f"layout {spec.layout} is not one of {_list(caps.layouts)}"),
        (
            not paged or spec.kv_dtype in caps.kv_dtypes,
            f"kv_dtype {spec.kv_dtype} is not one of {_list(caps.kv_dtypes)}",
        ),
        (
            caps.page_sizes is None or not paged or spec.page_size in caps.page_sizes,
            f"page size {spec.page_size} is not supported",
        ),
        (
            caps.window or spec.window is None,
            f"window {spec.window}: sliding windows are not supported",
        ),
        (caps.non_causal or spec.causal, "attention that is not causal is not supported"),
        (caps.soft_cap or not capped, "soft caps are not supported"),
        (caps.sinks or not sinks, "sinks are not supported"),
        (caps.tails or not tails, "tree rows are not supported"),
    )
    return next((why for holds, why in rules if not holds), None)


def _list(items: Sequence[str] | frozenset[str]) -> str:
    return ", ".join(sorted(items)) or "none that it states"
