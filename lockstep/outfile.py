"""Files that a command writes to a user's paths: tried before the work begins, written when it is
done. A missing folder is made when the file is written; "-" is stdout."""

import tempfile
from pathlib import Path

from lockstep.types import RuleError

RULE = "the output file can be written"
REMEDY = "Choose another place"


def check(option: str, where: str) -> None:
    """Raises unless `where` can be written later. Changes nothing."""
    if not where:
        raise RuleError(f"{option} names a file", "''", "Use - for stdout")
    if where == "-":
        return
    path = Path(where)
    try:
        if path.is_fifo():
            return  # opening it would wait for its reader
        if path.exists():
            with path.open("ab"):
                return
        folder = path.parent
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            return
    except OSError as error:
        raise RuleError(RULE, f"{option} {where}: {error.strerror}", REMEDY) from None


def write(where: str, text: str) -> None:
    """Writes the text to a file, whose folder is made if need be, or with "-" to stdout."""
    if where == "-":
        print(text.removesuffix("\n"))
        return
    path = Path(where)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise RuleError(RULE, f"{where}: {error.strerror}", REMEDY) from None
