"""Which device: its table of operations, by name, and why. Decided once, when a model is loaded.

A device is a folder here with `Ops` in its ops.py, or an entry point of the group
`lockstep.devices` in somebody else's package. Knows names and dtypes, no model.
"""

from __future__ import annotations

from pathlib import Path

from lockstep.kernels.operation import marked
from lockstep.ops import Ops
from lockstep.plugins import Plugins
from lockstep.types import Choice, RuleError

OWN = sorted(path.parent.name for path in Path(__file__).parent.glob("*/ops.py"))
DEVICES = Plugins(
    kind="device",
    group="lockstep.devices",
    attribute="Ops",
    own={name: f"lockstep.kernels.{name}.ops" for name in OWN},
)


def select(name: str, dtype: str = "auto") -> tuple[Ops, Choice]:
    """The table of the device called `name`, with activations of `dtype`; "auto" is its own. Its
    calls can be recorded."""
    ops = marked(DEVICES.make(name))
    if dtype == "auto":
        return ops, Choice(name, f"computes in its own {ops.dtypes[0]}")
    if dtype not in ops.dtypes:
        rule = f"dtype on {name} is one of {', '.join(ops.dtypes)}"
        raise RuleError(rule, repr(dtype), "Leave it out: stored weights are brought to it")
    return marked(DEVICES.make(name, dtype)), Choice(name, f"computes in {dtype}, as asked")
