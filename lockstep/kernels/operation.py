"""Operations: calls that a recorder of launches takes as one, with their tensors and numbers.

A kernel reads and writes memory behind torch's back. So functions are marked, those of a table by
`kernels.select`, a backend's `attend` by `run.step`: a `Recorder` that is active on this thread is
told of every call. One that is `transparent` it need not take as one.
"""

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch._C import _len_torch_dispatch_stack as active_modes
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from lockstep.ops import Ops

Given = ParamSpec("Given")
Result = TypeVar("Result")
MARK, TRANSPARENT = "_is_operation", "_is_transparent"
NAMES = [n for n, f in vars(Ops).items() if inspect.isfunction(f) and not n.startswith("_")]


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch does on this thread, and every operation."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch would load its compiler, which takes seconds, to keep it away from `cls`."""
        return False

    @abstractmethod
    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carries out an operation."""


def operation(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, of whose calls a recorder is told."""

    @functools.wraps(function)
    def called(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        if active_modes() == 0:
            return function(*args, **kwargs)
        recorder: Any = _get_current_dispatch_mode()
        if isinstance(recorder, Recorder):
            result: Result = recorder.call(function, *args, **kwargs)
            return result
        return function(*args, **kwargs)

    setattr(called, MARK, True)
    return called


def transparent(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """The function, of which a recorder sees all: it consists of compiled kernels that are noted
    one by one (`kernels.cpu.threads`), of views, and of what torch does."""
    setattr(function, TRANSPARENT, True)
    return function


def marked(table: Ops) -> Ops:
    """The table with every function an operation."""
    for name in NAMES:
        setattr(table, name, operation(getattr(table, name)))
    return table


def unmarked(table: Ops) -> list[str]:
    """The functions of a table that a recorder would not be told of."""
    return [name for name in NAMES if not hasattr(getattr(table, name), MARK)]
