"""Pages made from a run's document: docs/matrix.md, docs/known-failures.md, and one HTML file.

The pages of docs/ contain verdicts and reasons, which follow from the code (`promised`): checking
them takes no run, and `lab run` proves them. This module reads documents and runs no cell; the
texts are *.j2 files. `commands` calls it.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import zip_longest
from pathlib import Path

from markupsafe import Markup, escape

from lockstep.attention import select
from lockstep.lab.cells import KNOWN, TABLES, Cell, MatrixTable, cells, refusal
from lockstep.lab.document import Document, number, render
from lockstep.lab.reverts import ENVIRONMENT_VARIABLE, SECTIONS
from lockstep.types import RuleError

SYMBOLS = {"passed": "✓", "refused": "–", "known": "!", "failed": "✗"}
MARKS = {**SYMBOLS, "equivalent": "=", "absent": "·"}
FILES = ("matrix.md", "known-failures.md")

Verdicts = dict[Cell, tuple[str, str]]  # verdict and reason


def ran(doc: Document, backends: Sequence[str]) -> Verdicts:
    """Returns the verdicts of a run, which must have judged every cell in full."""
    have = {str(c["cell"]): (str(c["verdict"]), str(c["reason"])) for c in doc["cells"]}
    want, wrong = cells(backends), ""
    missing = [c for c in want if str(c) not in have]
    if doc.get("quick"):
        wrong = "a quick run"
    elif doc.get("revert"):
        wrong = f"a run with {doc['revert']} put back"
    elif missing:
        wrong = f"{len(want) - len(missing)} of {len(want)} cells, without {missing[0]}"
    if wrong:
        rule = "the matrix is made from a full run of every cell"
        raise RuleError(rule, wrong, "Run `lockstep lab run --json F`")
    return {c: have[str(c)] for c in want}


def promised(backends: Sequence[str]) -> Verdicts:
    """Returns the verdicts a page may state: refused by caps, known by KNOWN, or passed."""
    out: Verdicts = {}
    loaded = {name: select.load(name) for name in backends}
    for cell in cells(backends):
        reason, cause = refusal(cell, loaded[cell.backend]), KNOWN.get(str(cell))
        out[cell] = ("passed", "")
        if reason is not None:
            out[cell] = ("refused", reason)
        if cause is not None:
            out[cell] = ("known", cause)
    return out


def matrix_page(verdicts: Verdicts) -> str:
    """Renders tables of attention and of the engine per backend: features down, recipes across."""
    marks = {(c.backend, c.recipe, c.feature): SYMBOLS[v] for c, (v, _) in verdicts.items()}
    backends = []
    for name in dict.fromkeys(c.backend for c in verdicts):
        mine = [v for c, (v, _) in verdicts.items() if c.backend == name]
        counts = {v: mine.count(v) for v in SYMBOLS if v in mine}
        promises = sorted(select.load(name).caps.invariances)
        reasons = [_reasons(verdicts, name, table) for table in TABLES]
        found = {"name": name, "counts": counts, "promises": promises, "reasons": reasons}
        backends.append(found)
    return render("matrix.md", symbols=SYMBOLS, marks=marks, backends=backends, tables=TABLES)


def markdown(verdicts: Verdicts, known: Mapping[str, str] = KNOWN) -> dict[str, str]:
    texts = matrix_page(verdicts), render("known-failures.md", known=known)
    return dict(zip(FILES, texts, strict=True))


def stale(folder: Path, wanted: Mapping[str, str]) -> list[str]:
    """Returns the files that differ from the generated text, each with its first differing line."""
    out = []
    for path, want in ((folder / name, text.splitlines()) for name, text in wanted.items()):
        have = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        pairs = enumerate(zip_longest(have, want), 1)
        at = next((number for number, (a, b) in pairs if a != b), None)
        if at is not None:
            out.append(f"{path}:{at}: differs from what is generated")
    return out


def _reasons(verdicts: Verdicts, backend: str, table: MatrixTable) -> list[str]:
    """Returns why cells were refused, per feature and reason or together, and which failed."""
    refused: dict[tuple[str, str], list[str]] = {}
    failed = []
    mine = {c: v for c, v in verdicts.items() if c.backend == backend and c.table is table}
    for cell, (verdict, reason) in mine.items():
        if verdict == "refused":
            refused.setdefault((cell.feature, reason), []).append(cell.recipe)
        if verdict == "failed":
            failed.append(f"* failed: `{cell}`")
    if len(set(mine.values())) == 1 and refused:
        return [f"* refused: the whole table: {next(iter(refused))[1]}"]
    asked = {f.name: len(table.recipes_of(f)) for f in table.features}
    lines = []
    for (feature, reason), recipes in refused.items():
        where = "" if len(recipes) == asked[feature] else f" in {', '.join(recipes)}"
        lines.append(f"* refused: `{feature}`{where}: {reason}")
    return [*lines, *failed]


def html(doc: Document) -> str:
    """Renders the HTML page: every cell's properties, and the historical bugs as case files."""
    return render(
        "report.html",
        (number, prose, inline),
        doc=doc,
        cases=doc["kills"]["reverts"] if "kills" in doc else doc.get("cases", []),
        backends=list(dict.fromkeys(c["backend"] for c in doc["cells"])),
        by_place={(c["backend"], c["recipe"], c["feature"]): c for c in doc["cells"]},
        places={c["cell"]: Cell.parse(c["cell"]) for c in doc["cells"]},
        marks=MARKS,
        symbols=SYMBOLS,
        sections=SECTIONS,
        tables=TABLES,
        variable=ENVIRONMENT_VARIABLE,
        style=Markup((files("lockstep.lab") / "report.css").read_text(encoding="utf-8")),
    )


def prose(text: str) -> Markup:
    """Joins a text's lines into paragraphs and list items."""
    return inline(re.sub(r"(?<!\n)\n(?!\n|[-*]\s|\d+[.)]\s)", " ", text.strip()))


def inline(text: str) -> Markup:
    """Converts backticks to code; links addresses and owner/repository#number."""
    link = r'<a href="{}" rel="noreferrer">{}</a>'
    safe = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", str(escape(text)))
    safe = re.sub(r"(https?://[^\s<>()]+[^\s<>().,;])", link.format(r"\1", r"\1"), safe)
    issue = link.format(r"https://github.com/\1/issues/\2", r"\1#\2")
    return Markup(re.sub(r"(?<![\w/])([\w.-]+/[\w.-]+)#(\d+)\b", issue, safe))
