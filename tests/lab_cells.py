"""Cells of the lab as tests: every cell of `cpu` and the quick ones of `reference`. `lockstep lab
mutate` asks for some of them by name; pytest alone does not collect this file."""

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
    """Judged in this process, known failures as the lab has them."""
    result = cells.settle(cells.run_cell(cells.Cell.parse(cell)), False)
    if result.verdict == "refused":
        pytest.skip(result.reason)
    if result.verdict == "failed":
        pytest.fail(result.reason, pytrace=False)
