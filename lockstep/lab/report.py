"""The lab's page: one static HTML file made from a document, without fonts, images or scripts from
elsewhere.

Shows the matrix with every cell's properties, and the historical bugs as case files: their story
from the docstring, what was measured with the bug and without it from what ran. Knows the document
and nothing of how it came about. `lab run --html` and `lab reverts --html` call it; the page itself
is `report.html.j2`, its looks are `report.css`.
"""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from markupsafe import Markup, escape

from lockstep.lab.cells import TABLES, Cell
from lockstep.lab.document import Document, number, render
from lockstep.lab.matrix import SYMBOLS
from lockstep.lab.reverts import SECTIONS, VARIABLE

MARKS = {**SYMBOLS, "equivalent": "=", "absent": "·"}


def page(doc: Document) -> str:
    return render(
        "report.html",
        (number, percent, prose, inline),
        doc=doc,
        cases=doc["kills"]["reverts"] if "kills" in doc else doc.get("cases", []),
        backends=list(dict.fromkeys(c["backend"] for c in doc["cells"])),
        by_place={(c["backend"], c["recipe"], c["feature"]): c for c in doc["cells"]},
        places={c["cell"]: place(c["cell"]) for c in doc["cells"]},
        marks=MARKS,
        symbols=SYMBOLS,
        sections=SECTIONS,
        tables=TABLES,
        variable=VARIABLE,
        style=Markup((files("lockstep.lab") / "report.css").read_text(encoding="utf-8")),
    )


def place(cell: str) -> dict[str, Any]:
    """What a cell is made of."""
    parsed = Cell.parse(cell)
    recipe, feature = parsed.pair()
    return {"recipe": recipe, "feature": feature, "measures": parsed.table.measures}


def prose(text: str) -> Markup:
    """Paragraphs; lines that begin with `-`, `*` or a number, and what follows them, as lists."""
    out = Markup()
    bullet = re.compile(r"([-*]|\d+[.)])\s+")
    for block in re.split(r"\n\s*\n", text.strip()):
        items: list[list[str]] = [[]]
        for line in block.splitlines():
            if bullet.match(line):
                items.append([bullet.sub("", line, count=1)])
            else:
                items[-1].append(line)
        head, *points = (inline(" ".join(lines)) for lines in items)
        out += Markup("<p>{}</p>").format(head) if head else ""
        if points:
            kind = Markup("ol" if re.search(r"^\d+[.)]\s", block, re.M) else "ul")
            listed = Markup().join(Markup("<li>{}</li>").format(point) for point in points)
            out += Markup("<{0}>{1}</{0}>").format(kind, listed)
    return out


def inline(text: str) -> Markup:
    """Code in backticks; addresses, and owner/repository#number, as links."""
    link = r'<a href="{}" rel="noreferrer">{}</a>'
    safe = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", str(escape(text)))
    safe = re.sub(r"(https?://[^\s<>()]+[^\s<>().,;])", link.format(r"\1", r"\1"), safe)
    issue = link.format(r"https://github.com/\1/issues/\2", r"\1#\2")
    return Markup(re.sub(r"(?<![\w/])([\w.-]+/[\w.-]+)#(\d+)\b", issue, safe))


def percent(share: float | None) -> str:
    """A share of the tolerance; what is far beyond it, as a multiple."""
    if share is None:
        return "not a number"
    return f"{100 * share:.2g} %" if share < 10 else f"{share:,.0f} times"
