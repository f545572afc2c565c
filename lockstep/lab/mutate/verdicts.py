"""What a person has found out about survivors, by the id of the mutant, and the counts that follow.

A survivor is `equivalent` (no run can differ: a proof in a sentence), `neutral` (runs differ, but
no answer, count or error can: the reason), or `open`. The file is a JSON object,
id → {"judgement": ..., "reason": ...}. Knows no mutants but their ids. `command` calls it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.types import RuleError

JUDGEMENTS = ("equivalent", "neutral", "open")
COUNTED = ("killed", *JUDGEMENTS)


@dataclass(frozen=True)
class Verdict:
    """A judgement and why."""

    judgement: str
    reason: str


def read(path: Path) -> dict[str, Verdict]:
    """The file's verdicts; none if there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        found = {key: Verdict(v["judgement"], v["reason"].strip()) for key, v in value.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        rule = 'a verdict is "id": {"judgement": ..., "reason": ...}'
        raise RuleError(rule, f"{path}: {type(error).__name__}: {error}", "Mend the file") from None
    for key, verdict in found.items():
        if verdict.judgement not in JUDGEMENTS:
            raise RuleError(
                f"a judgement is one of {', '.join(JUDGEMENTS)}",
                f"{key}: {verdict.judgement!r}",
                "Choose one",
            )
        if not verdict.reason:
            raise RuleError("a judgement has a reason", f"{key}: none", "Say why, in a sentence")
    return found


def count(mutants: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Module → how many are killed, equivalent, neutral, open; and the share of kills."""
    out: dict[str, dict[str, Any]] = {}
    for mutant in mutants:
        row = out.setdefault(mutant["module"], dict.fromkeys(COUNTED, 0))
        row[mutant["verdict"]] += 1
    for row in [*out.values()]:
        row["share"] = share(row)
    total: dict[str, Any] = {name: sum(row[name] for row in out.values()) for name in COUNTED}
    return {**out, "all": {**total, "share": share(total)}}


def share(row: Mapping[str, Any]) -> float | None:
    """Killed, of those that are neither equivalent nor neutral; None where there are none."""
    counted = int(row["killed"]) + int(row["open"])
    return round(int(row["killed"]) / counted, 4) if counted else None
