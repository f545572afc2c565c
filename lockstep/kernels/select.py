"""Selects the device, i.e. its table of operations, with a reason. Runs once per loaded model.

A device is a folder here with `Ops` in its ops.py, or an entry point of the group
`lockstep.devices` in another package. This module knows names and dtypes, no model.
"""

from pathlib import Path

import torch

from lockstep.ops import Ops, mark_operations
from lockstep.plugins import Plugins
from lockstep.types import Choice, RuleError

SM_MAJOR = 9  # compute capability of the supported GPUs, which have their own order: sm_90
OWN = sorted(path.parent.name for path in Path(__file__).parent.glob("*/ops.py"))
DEVICES = Plugins(
    kind="device",
    group="lockstep.devices",
    attribute="Ops",
    own={name: f"lockstep.kernels.{name}.ops" for name in OWN},
    protocol=Ops,
)


def select(name: str, dtype: str = "auto") -> tuple[Ops, Choice]:
    """Returns the operations of device `name` with activations of `dtype`, marked for recording.
    Name "auto": a supported GPU if there is one, else the CPU. Dtype "auto": the device's own."""
    if name == "auto":
        name, found = find()
        ops, choice = select(name, dtype)
        return ops, Choice(name, f"{found}, {choice.reason}")
    ops = mark_operations(DEVICES.make(name))
    if dtype == "auto":
        return ops, Choice(name, f"computes in {ops.dtypes[0]}, its default")
    if dtype not in ops.dtypes:
        rule = f"dtype on {name} is one of {', '.join(ops.dtypes)}"
        raise RuleError(rule, repr(dtype), f"Leave dtype out to compute in {ops.dtypes[0]}")
    choice = Choice(name, f"computes in {dtype}, as requested")
    return mark_operations(DEVICES.make(name, dtype)), choice


def find() -> Choice:
    """Returns the device to use on this machine, with the reason."""
    if not torch.cuda.is_available():
        return Choice("cpu", "no GPU is visible")
    (major, minor), card = torch.cuda.get_device_capability(), torch.cuda.get_device_name()
    if major != SM_MAJOR:
        return Choice("cpu", f"{card} is sm_{major}{minor}; only sm_{SM_MAJOR}0 is supported")
    return Choice("cuda", f"{card} is available")
