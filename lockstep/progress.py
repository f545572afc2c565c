"""A progress bar on stderr for commands that take long: a line that redraws itself on a terminal, a
few plain lines elsewhere.

Knows a total, a count and a clock; nothing about what is counted. The command line and the
benchmarks use it. Standard library only.
"""

from __future__ import annotations

import shutil
import sys
import time
from types import TracebackType
from typing import Self, TextIO

REDRAW_S = 0.1
PLAIN_LINES = 10  # about this many lines where nobody can redraw


class Progress:
    """`with Progress(total, "lab run") as bar: bar.step("cpu/decode/dense")`."""

    def __init__(self, total: int, label: str, stream: TextIO | None = None) -> None:
        self.total, self.label, self.stream = total, label, stream or sys.stderr
        self.done, self.bad = 0, 0
        self._live = self.stream.isatty()
        self._begin = self._drawn = time.perf_counter()
        self._tenth = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._write("\r\x1b[K")

    def step(self, note: str = "", bad: bool = False) -> None:
        """One more is done; `note` names it, `bad` ones are counted separately."""
        self.done, self.bad = self.done + 1, self.bad + bad
        now = time.perf_counter()
        if self._live and (now - self._drawn >= REDRAW_S or self.done == self.total):
            self._drawn = now
            self._write(f"\r\x1b[K{self._line(note, shutil.get_terminal_size().columns)}")
        elif not self._live and self.done * PLAIN_LINES // max(self.total, 1) > self._tenth:
            self._tenth = self.done * PLAIN_LINES // self.total
            self._write(f"{self.label}: {self._counts()}\n")

    def _counts(self) -> str:
        seconds = time.perf_counter() - self._begin
        left = seconds / self.done * (self.total - self.done)
        bad = f", {self.bad} failed" if self.bad else ""
        return f"{self.done}/{self.total}{bad}, {seconds:.0f} s" + (
            f", about {left:.0f} s left" if self.done < self.total else ""
        )

    def _line(self, note: str, columns: int) -> str:
        width = max(min(30, columns - 60), 5)
        full = width * self.done // max(self.total, 1)
        return f"{self.label} [{'#' * full}{'.' * (width - full)}] {self._counts()}  {note}"[
            : columns - 1
        ]

    def _write(self, text: str) -> None:
        self.stream.write(text)
        self.stream.flush()
