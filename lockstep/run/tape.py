"""A launch, recorded and replayed: what a captured graph does, on any device that torch runs on.

A tape notes the calls of operations and, as a dispatch mode, torch's own operations between them. A
replay repeats these into the same memory without any Python of the model, so a number that was not
read from the arena keeps its old value. For transparent operations it notes the CPU's kernels;
consecutive kernels are repeated as one call. Knows no model and no plan; the runner records one per
signature.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _len_torch_dispatch_stack as active_modes
from torch.utils._python_dispatch import _pop_mode

from lockstep.kernels.cpu import rows, threads
from lockstep.ops import TRANSPARENT, Recorder
from lockstep.types import RuleError

MEMORY = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")


@dataclass(frozen=True, eq=False)
class Call:
    """One call, and those of its results that are not in its arguments' memory."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[tuple[int, Tensor], ...]

    def repeat(self) -> None:
        made = tensors(self.function(*self.args, **self.kwargs))
        for at, memory in self.results:
            if made[at].shape != memory.shape or made[at].dtype != memory.dtype:
                rule = "a recorded call gives results of one shape"
                got = f"{_text(memory)}, then {_text(made[at])}"
                raise RuleError(rule, got, f"Give {self.function} a shape by the bucket")
            memory.copy_(made[at])


class Tape(Recorder):  # type: ignore[no-untyped-call]
    """`record` a launch once, `replay` it afterwards. `output` is what the launch returned. Its
    kernels work in a `room`, which tapes may share."""

    def __init__(self, room: threads.TapeMemory | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.room = room or threads.TapeMemory()
        self.output: Any = None
        self.refusal: RuleError | None = None
        self.replays = 0
        self._calls: list[Call | threads.Script] = []
        self.held: list[Any] = []  # keeps memory alive that kernels point to

    def record(self, launch: Callable[[], Any]) -> None:
        """Runs a launch and records it. If it cannot be recorded, raises after it has run."""
        outside = active_modes()
        try:
            threads.OWN.tape = self
            with self:
                self.output = launch()
        finally:
            threads.OWN.tape = None
            while active_modes() > outside:  # an interrupt struck before the block was entered
                _pop_mode()
        if self.refusal is not None:
            raise self.refusal

    def note(self, call: threads.Call, record: Any) -> None:
        """Appends a kernel that is about to run."""
        if not self._calls or isinstance(self._calls[-1], Call):
            self._calls.append(threads.Script())
        script: Any = self._calls[-1]
        script.add(call, record)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if threads.OWN.tape is None:
            return func(*args, **kwargs)
        if asks_numbers(func, args):
            rule = "the shapes of a recorded launch are those of its bucket"
            got = f"{func}, which depends on values of tensors"
            self.refusal = RuleError(rule, got, "Run it without recording, or make it an operation")
            threads.OWN.tape = None
            return func(*args, **kwargs)
        copied = copies(func, args)
        if copied is not None:  # copied by a kernel: any other call would split a script
            target, pairs = copied
            for source, place in pairs:
                rows.copy(source, place)
            self.held += [target, *args]
            return target
        result = func(*args, **kwargs)
        if func.overloadpacket.__name__ not in MEMORY:
            self._note(func, args, kwargs, result)
        return result

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs an operation; notes it as one call unless the recorder sees all that it does."""
        if hasattr(function, TRANSPARENT):
            self.held += [each for each in (*args, *kwargs.values()) if not self.room.holds(each)]
        if hasattr(function, TRANSPARENT) or threads.OWN.tape is None:
            return function(*args, **kwargs)
        threads.OWN.tape = None
        try:
            result = function(*args, **kwargs)
        finally:
            threads.OWN.tape = self
        self._note(function, args, kwargs, result)
        return result

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Appends a call unless it only makes views of its arguments: these need no repeat."""
        given = {_memory(tensor) for tensor in tensors((args, kwargs))}
        made = enumerate(tensors(result))
        fresh = tuple((at, tensor) for at, tensor in made if _memory(tensor) not in given)
        schema = getattr(function, "_schema", None)
        if fresh or schema is None or schema.is_mutable:
            self._calls.append(Call(function, args, kwargs, fresh))

    def replay(self) -> Any:
        """Repeats everything with the arena's current numbers, into the memory of the first run."""
        for one in self._calls:
            one.repeat()
        self.replays += 1
        return self.output


def copies(func: Any, args: tuple[Any, ...]) -> tuple[Tensor, list[tuple[Tensor, Tensor]]] | None:
    """Returns, for a torch call that only copies float32 rows on a CPU (`copy_`, `cat` of columns),
    its result and (source, target) pairs; else None."""
    copy, cat = torch.ops.aten.copy_.default, torch.ops.aten.cat.default
    if func is copy and plain_rows(args[:2]) and args[0].shape == args[1].shape:
        return args[0], [(args[1], args[0])]
    if func is not cat or args[1:] not in ((-1,), (1,)) or not plain_rows(args[0]):
        return None
    widths = [part.shape[1] for part in args[0]]
    made = threads.empty(len(args[0][0]), sum(widths))
    places = torch.split(made, widths, 1)
    return made, list(zip(args[0], places, strict=True))


def plain_rows(some: Sequence[Any]) -> bool:
    """Whether all are 2-D float32 on a CPU, with equally many rows and contiguous columns."""
    kinds = {(t.ndim, t.dtype, t.device.type, t.stride()[-1:], t.shape[:1]) for t in tensors(some)}
    alike = len(kinds) == 1 and all(t.numel() for t in tensors(some))
    return alike and next(iter(kinds))[:4] == (2, torch.float32, "cpu", (1,))


def asks_numbers(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether a result's shape, or a result on the host, depends on the numbers in tensors."""
    if func.overloadpacket is torch.ops.aten.index:
        return any(index.dtype in (torch.bool, torch.uint8) for index in tensors(args[1]))
    asking = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return bool(asking & set(func.tags))


def tensors(value: Any) -> list[Tensor]:
    """Returns the tensors in nested tuples, lists, mappings and dataclasses, in order."""
    if isinstance(value, Tensor):
        return [value]
    if is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    return [t for each in value for t in tensors(each)] if isinstance(value, tuple | list) else []


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _text(tensor: Tensor) -> str:
    return f"{tensor.dtype} of {list(tensor.shape)}"
