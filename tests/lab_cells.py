"""The lab's cells as tests: every cell of `cpu` and the quick ones of `reference`. `lockstep lab
mutate` runs some of them by name; pytest alone does not collect this file."""

from __future__ import annotations

import pytest

from lockstep.lab import cells, commands

CELLS = [
    str(cell)
    for cell in cells.cells(["cpu", "reference"])
    if cell.backend == "cpu" or commands.quick(cell)
]


@pytest.mark.parametrize("cell", CELLS)
def test_cell(cell: str) -> None:
    """Judges the cell in this process, with the lab's list of known failures."""
    result = cells.apply_known_failures(cells.run_cell(cells.Cell.parse(cell)), False)
    if result.verdict == "refused":
        pytest.skip(result.reason)
    if result.verdict == "failed":
        pytest.fail(result.reason, pytrace=False)
