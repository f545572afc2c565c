"""Cells that are known to fail, with the cause. `docs/known-failures.md` is made from this.

A known failure is no failure of the run; one that starts to pass is, until it is taken out here.
Quick runs look at fewer properties, so there a pass proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lockstep.lab.cells import Result

KNOWN: dict[str, str] = {}  # "backend/recipe/feature" -> cause


def settle(result: Result, quick: bool, known: Mapping[str, str] = KNOWN) -> Result:
    """The verdict in the light of what is known."""
    cause = known.get(str(result.cell))
    if cause is None:
        return result
    if result.verdict == "failed":
        return replace(result, verdict="known", reason=f"{cause} ({result.reason})")
    if quick:
        return result
    return replace(
        result,
        verdict="failed",
        reason=f"{result.verdict}, but listed in lab/known.py ({cause}): take it out there",
    )
