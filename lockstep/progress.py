"""A progress bar on stderr for commands that take long: a line that redraws itself on a terminal, a
line every half minute elsewhere. Drawn by tqdm."""

import sys

from tqdm import tqdm

REDRAW_S = 0.1
PLAIN_S = 30.0  # where a line cannot be redrawn


class Progress(tqdm):  # type: ignore[misc]
    """`with Progress(total, "lab run") as bar: bar.step("cpu/decode/dense")`."""

    def __init__(self, total: int, label: str) -> None:
        redraws = sys.stderr.isatty()
        every_s = REDRAW_S if redraws else PLAIN_S
        # a log keeps the last line, on a terminal it is cleared for further output
        drawn = {"file": sys.stderr, "mininterval": every_s, "leave": not redraws}
        super().__init__(total=total, desc=label, **drawn)
        self.bad = 0

    def step(self, note: str = "", bad: bool = False) -> None:
        """Counts one more as done; `note` names it, `bad` ones are counted separately."""
        self.bad += bad
        failed = f"{self.bad} failed, " if self.bad else ""
        self.set_postfix_str(f"{failed}{note}", refresh=False)
        self.update()
