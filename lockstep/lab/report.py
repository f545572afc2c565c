"""The lab's page: one static HTML file made from a document, without fonts, images or scripts from
elsewhere.

Shows the matrix with every cell's properties, and the historical bugs as case files: their story
from the docstring, what was measured with the bug and without it from what ran. Knows the document
and nothing of how it came about. `lab run --html` and `lab reverts --html` call it; the looks are
in `report.css`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from lockstep.lab.cells import Cell
from lockstep.lab.document import Document
from lockstep.lab.matrix import SYMBOLS
from lockstep.lab.reverts import SECTIONS, VARIABLE
from lockstep.lab.sheets import SHEETS, Sheet

SCRIPT = """
const show = () => { const at = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let up = at; up; up = up.parentElement) if (up.tagName === 'DETAILS') up.open = true; if (at) at.scrollIntoView(); };
addEventListener('hashchange', show); show();
const box = document.getElementById('filter'); box.hidden = false;
box.addEventListener('input', () => { const words = box.value.toLowerCase().split(/\\s+/);
  for (const item of document.querySelectorAll('[data-text]')) item.hidden = !words.every(w => item.dataset.text.includes(w)); });
"""
MARKS = {**SYMBOLS, "equivalent": "=", "absent": "·"}
PROMISE = (
    "An answer is a function of the model, the prompt, the parameters and the seed, and of nothing "
    "else. Each cell runs one kind of step "
    "on one kind of attention, or whole engines with a tiny model, and compares with float64 and, "
    "bit by bit, with other ways to compute."
)
KILLS = (
    "Each bug replaces one function of the engine, in a process of its own. It must be noticed in "
    "every cell it declares: with the checks "
    "of the plan on, and with them off, where only a property counts."
)


def el(name: str, *inner: str, **attributes: str) -> str:
    """An element. `inner` is HTML already, attributes are plain text; a trailing _ in their names
    is dropped, others become -."""
    said = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
        for key, value in attributes.items()
    )
    return f"<{name}{said}>{''.join(inner)}</{name}>"


def page(doc: Document) -> str:
    """The whole page."""
    cases = doc["kills"]["reverts"] if "kills" in doc else doc.get("cases", [])
    backends = list(dict.fromkeys(c["backend"] for c in doc["cells"]))
    places = [*((f"matrix-{b}", b) for b in backends), *([("reverts", "reverts")] if cases else [])]
    links = [
        el("a", escape(name), href=f"#{to}")
        for to, name in [*places, ("cells", "cells"), ("environment", "environment")]
    ]
    field = (
        '<input id="filter" type="search" placeholder="filter cells and cases" aria-label="filter" '
        "hidden>"
    )
    parts = [
        header(doc, cases),
        el("nav", *links, field),
        summary_table(doc),
        *(matrix(doc, backend) for backend in backends),
    ]
    parts += [reverts_section(doc, cases)] if cases else []
    parts += [cell_list(doc, backends), environment(doc), el("script", SCRIPT)]
    style = (files("lockstep.lab") / "report.css").read_text(encoding="utf-8")
    meta = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
    )
    head = el("head", meta, el("title", "Lockstep lab"), el("style", "\n", style))
    return f"<!doctype html>\n{el('html', head, el('body', chr(10).join(parts)), lang='en')}\n"


def header(doc: Document, cases: Sequence[dict[str, Any]]) -> str:
    """The verdict in one line, and what was run."""
    failed, total = doc["summary"]["failed"], doc["summary"]["cells"]
    judged = [c for c in cases if "killed" in c and not c["equivalent"]]
    alive = sum(not c["killed"] for c in judged)
    verdict = "failed" if failed or alive else "passed"
    words = [f"{total} cells, {failed} failed" if failed else f"{total} cells, none failed"]
    words += (
        [f"{len(judged)} historical bugs put back, {len(judged) - alive} noticed"] if judged else []
    )
    banner = el("p", MARKS[verdict], " ", escape("; ".join(words)), class_=f"banner {verdict}")
    revert = (
        el(
            "p",
            escape(f"A historical bug was in place: {VARIABLE}={doc['revert']}."),
            class_="warn",
        )
        if doc["revert"]
        else ""
    )
    quick = (
        " This was a quick run: a handful of features, fewer properties." if doc["quick"] else ""
    )
    ran = el(
        "p",
        el("code", escape(doc["command"])),
        " ",
        el("span", f"{escape(doc['date'])}, {doc['summary']['seconds']:.0f} s"),
        class_="fine",
    )
    return el("header", el("h1", "Lockstep lab"), banner, revert, el("p", PROMISE, quick), ran)


def table(heads: Iterable[str], rows: Iterable[str], kind: str) -> str:
    """A table that scrolls by itself where it is too wide."""
    top = el("thead", el("tr", *(el("th", h) for h in heads)))
    return el("div", el("table", top, el("tbody", *rows), class_=f"list {kind}"), class_="scroll")


def summary_table(doc: Document) -> str:
    """Counts by backend and the cell that came closest to its tolerance."""
    rows = []
    for name, b in doc["summary"]["backends"].items():
        cells = [el("th", el("a", escape(name), href=f"#matrix-{name}"))]
        cells += [el("td", str(b[v]), class_=f"n {v if b[v] else 'none'}") for v in SYMBOLS]
        worst = b["worst"]
        told = (
            (number(worst["out_error"]), percent(worst["tolerance_used"]), cell_link(worst["cell"]))
            if worst
            else ("", "", "")
        )
        rows.append(
            el(
                "tr",
                *cells,
                *(el("td", t, class_=kind) for t, kind in zip(told, ("n", "n", ""), strict=True)),
            )
        )
    return table(
        ("backend", *SYMBOLS, "largest error", "of its tolerance", "in cell"), rows, "counts"
    )


def matrix(doc: Document, backend: str) -> str:
    """One table of attention and one of the engine, as far as they ran."""
    mine = {(c["recipe"], c["feature"]): c for c in doc["cells"] if c["backend"] == backend}
    tables = [
        el("div", marks_table(mine, sheet), class_="scroll")
        for sheet in SHEETS
        if any(r.name == recipe for r in sheet.recipes for recipe, _ in mine)
    ]
    return el(
        "section",
        el("h2", escape(backend)),
        *tables,
        legend(),
        refusals(mine.values()),
        id=f"matrix-{backend}",
    )


def marks_table(mine: dict[tuple[str, str], dict[str, Any]], sheet: Sheet) -> str:
    """Features down, recipes across; every mark leads to its cell."""
    recipes = [r for r in sheet.recipes if any(r.name == recipe for recipe, _ in mine)]
    rows = []
    for f in (f for f in sheet.features if any(f.name == feature for _, feature in mine)):
        marks = []
        for r in recipes:
            cell = mine.get((r.name, f.name))
            if cell is not None:
                tip = f"{cell['cell']}: {cell['verdict']} {cell['reason']}".strip()
                link = el("a", SYMBOLS[cell["verdict"]], href=f"#{cell['cell']}", title=tip)
                marks.append(el("td", link, class_=cell["verdict"]))
            else:
                marks.append(
                    el("td", MARKS["absent"], class_="absent", title="not part of this run")
                    if r.suits(f)
                    else el("td")
                )
        rows.append(el("tr", el("th", f.name, title=f.says), *marks))
    heads = (el("th", el("span", r.name), title=r.says) for r in recipes)
    return el("table", el("thead", el("tr", el("td"), *heads)), el("tbody", *rows), class_="matrix")


def legend() -> str:
    """What the marks mean."""
    marks = [el("span", el("b", s, class_=v), f" {v}") for v, s in SYMBOLS.items()]
    words = ("· not part of this run", "empty: the recipe makes no sense for the feature")
    return el("p", *marks, *(el("span", w) for w in words), class_="legend")


def refusals(mine: Iterable[dict[str, Any]]) -> str:
    """Reasons of refused cells, each once."""
    reasons = dict.fromkeys((c["feature"], c["reason"]) for c in mine if c["verdict"] == "refused")
    return "".join(
        el("p", "refused ", el("code", escape(f)), f": {escape(why)}", class_="fine")
        for f, why in reasons
    )


def cell_list(doc: Document, backends: Sequence[str]) -> str:
    """Every cell in full, folded; failed ones open."""
    parts = [el("h2", "Cells")]
    for backend in backends:
        parts += [
            el("h3", escape(backend)),
            *(cell_detail(doc, c) for c in doc["cells"] if c["backend"] == backend),
        ]
    return el("section", "\n".join(parts), id="cells")


def cell_detail(doc: Document, cell: dict[str, Any]) -> str:
    """One cell: verdict, error, properties, counters, command."""
    place = Cell.parse(cell["cell"])
    recipe, feature = place.pair()
    verdict, used = cell["verdict"], percent(cell["tolerance_used"])
    told = f"{used} of the tolerance" if verdict == "passed" else cell["reason"]
    body = [el("p", escape(f"{recipe.says[0].upper()}{recipe.says[1:]}; {feature.says}."))]
    if cell["findings"]:
        errors = f"Largest error {number(cell['out_error'])} in {place.sheet.measures}"
        errors += f", {number(cell['lse_error'])} in the LSE" if cell["lse_error"] else ""
        body += [el("p", f"{errors}: {used} of what fp32 allows. {cell['seconds']:.2f} s.")]
        body += [
            el(
                "div",
                el("table", *map(finding, cell["findings"]), class_="findings"),
                class_="scroll",
            )
        ]
    counters = ", ".join(
        f"{name.replace('_', ' ')} {count}"
        for name, count in sorted(cell["counters"].items())
        if count
    )
    body += [el("p", escape(counters), class_="fine")] if counters else []
    again = f"{VARIABLE}={doc['revert']} {cell['command']}" if doc["revert"] else cell["command"]
    body += [el("pre", escape(again))]
    mark, name = el("b", SYMBOLS[verdict], class_=verdict), el("code", escape(cell["cell"]))
    summary = el("summary", mark, " ", name, " ", el("span", escape(told), class_="fine"))
    folded = {"open": "open"} if verdict in ("failed", "known") else {}
    return el(
        "details",
        summary,
        el("div", *body, id=cell["cell"]),
        class_="item",
        data_text=f"{cell['cell']} {verdict}",
        **folded,
    )


def finding(f: dict[str, Any]) -> str:
    """One property."""
    verdict = "passed" if f["held"] else "failed"
    row = (el("td", SYMBOLS[verdict]), el("th", escape(f["name"])), el("td", escape(f["detail"])))
    return el("tr", *row, class_="held" if f["held"] else "broken")


def reverts_section(doc: Document, cases: Sequence[dict[str, Any]]) -> str:
    """Who noticed which bug, if it was tried; then the case files."""
    rows = []
    for c in (c for c in cases if "killed" in c):
        on = "<br>".join(escape(f"guard: {rule}") for rule in c["rules"]) or escape(
            ", ".join(c["by_on"])
        )
        off = "the same" if c["by_on"] == c["by_off"] else escape(", ".join(c["by_off"]))
        told = (
            (on or "nothing", off or "nothing")
            if not c["equivalent"]
            else ("not counted: nothing can notice it", "see its proof")
        )
        name = el("th", el("a", escape(c["name"]), href=f"#case-{c['name']}"))
        target = el(
            "td", el("code", escape(c["target"].removeprefix("lockstep.")).replace(":", ":<wbr>"))
        )
        mark = el("td", el("b", MARKS[case_verdict(c)], class_=case_verdict(c)))
        rows.append(
            el("tr", mark, name, target, *(el("td", t) for t in told), data_text=case_text(c))
        )
    heads = (
        "",
        "revert",
        "what is put back",
        "noticed with plan checks on",
        "noticed with plan checks off",
    )
    there = {c["name"] for c in cases}
    top = [
        el("h2", "Historical bugs, put back"),
        *kill_words(doc),
        table(heads, rows, "kills") if rows else "",
    ]
    return el(
        "section",
        *top,
        el("h3", "Case files"),
        "\n".join(case_file(doc, c, there) for c in cases),
        id="reverts",
    )


def kill_words(doc: Document) -> list[str]:
    """What the table shows, and that the same cells are green without a bug."""
    if "kills" not in doc:
        hint = el("code", "lockstep lab reverts --html F")
        return [
            el(
                "p",
                "Each is a bug that somebody shipped. ",
                hint,
                " puts them back one by one and shows what notices.",
            )
        ]
    baseline = doc["kills"]["baseline"]
    red = [cell for cell, result in baseline.items() if result["verdict"] != "passed"]
    if red:
        return [
            el("p", escape(f"RED without any bug: {', '.join(red)}."), class_="warn"),
            el("p", KILLS),
        ]
    return [el("p", f"Without a bug all {len(baseline)} cells used here are green. {KILLS}")]


def case_file(doc: Document, case: dict[str, Any], there: set[str]) -> str:
    """One bug: its story, what was measured, what it is related to."""
    body = [
        el(
            "p",
            "Source: ",
            inline(case["source"]),
            "<br>Replaces ",
            el("code", escape(case["target"])),
            class_="fine",
        )
    ]
    for section in (s for s in SECTIONS if s in case["story"]):
        body += [el("h4", section), prose(case["story"][section])]
    if case["equivalent"]:
        body += [el("h4", "Equivalent: nothing can notice it"), prose(case["equivalent"])]
    body += [measured(doc, case)]
    if case["related"]:
        related = [
            el("a", escape(r), href=f"#case-{r}") if r in there else escape(r)
            for r in case["related"]
        ]
        body += [el("h4", "Related cases"), el("p", ", ".join(related))]
    if case["cells"]:
        again = f"{VARIABLE}={case['name']} lockstep lab show cpu/{case['cells'][0]} --no-checks"
        body += [el("h4", "See it"), el("pre", escape(again))]
    mark = (
        el("b", MARKS[case_verdict(case)], class_=case_verdict(case)) + " "
        if "killed" in case
        else ""
    )
    summary = el("summary", mark, el("code", escape(case["name"])), " ", inline(case["title"]))
    return el(
        "details",
        summary,
        el("article", *body, id=f"case-{case['name']}"),
        class_="item",
        data_text=case_text(case),
    )


def case_verdict(case: dict[str, Any]) -> str:
    """Of a bug that was put back: passed means that it was noticed."""
    return "equivalent" if case["equivalent"] else "passed" if case["killed"] else "failed"


def case_text(case: dict[str, Any]) -> str:
    """What the filter looks at."""
    return f"{case['name']} {case['title']} {case['target']}".lower()


def measured(doc: Document, case: dict[str, Any]) -> str:
    """What failed with the bug, and the same cell without it."""
    rows = []
    for trial in case.get("trials", []):
        base = doc["kills"]["baseline"][trial["cell"]]
        broken = [
            el("li", el("b", escape(f["name"])), " ", escape(f["detail"])) for f in trial["broken"]
        ] or [el("li", "nothing")]
        without = (
            f"{escape(base['verdict'])}, error {number(base['out_error'])}, "
            f"{percent(base['tolerance_used'])} of the tolerance"
        )
        verdict = "passed" if trial["killed"] else "failed"
        cells = (
            el("b", SYMBOLS[verdict], class_=verdict),
            cell_link(base["cell"]),
            "on" if trial["checks"] else "off",
        )
        rows.append(el("tr", *(el("td", c) for c in (*cells, el("ul", *broken), without))))
    heads = ("", "cell", "checks", "fails with the bug", "without it")
    return el("h4", "Measured") + table(heads, rows, "trials") if rows else ""


def environment(doc: Document) -> str:
    """Where it ran."""
    rows = [
        el("tr", el("th", escape(k)), el("td", escape(str(v))))
        for k, v in doc["environment"].items()
    ]
    return el(
        "section",
        el("h2", "Environment"),
        el("table", el("tbody", *rows), class_="list facts"),
        id="environment",
    )


def prose(text: str) -> str:
    """Paragraphs, and lines that begin with `-`, `*` or a number as lists; an item goes on until
    the next begins."""
    out: list[str] = []
    bullet = re.compile(r"([-*]|\d+[.)])\s+")
    for block in re.split(r"\n\s*\n", text.strip()):
        items: list[list[str]] = [[]]
        for line in block.splitlines():
            if bullet.match(line):
                items.append([bullet.sub("", line, count=1)])
            else:
                items[-1].append(line)
        out += [el("p", inline(" ".join(items[0])))] if items[0] else []
        if items[1:]:
            kind = "ol" if re.search(r"^\d+[.)]\s", block, re.M) else "ul"
            out.append(el(kind, *(el("li", inline(" ".join(i))) for i in items[1:])))
    return "".join(out)


def inline(text: str) -> str:
    """Code in backticks; addresses, and owner/repository#number, as links."""
    safe = re.sub(r"`+([^`]+)`+", r"<code>\1</code>", escape(text))
    safe = re.sub(
        r"(https?://[^\s<>()]+[^\s<>().,;])", r'<a href="\1" rel="noreferrer">\1</a>', safe
    )
    return re.sub(
        r"(?<![\w/])([\w.-]+/[\w.-]+)#(\d+)\b",
        r'<a href="https://github.com/\1/issues/\2" rel="noreferrer">\1#\2</a>',
        safe,
    )


def cell_link(cell: str) -> str:
    """To the cell's own place."""
    return el("a", el("code", escape(cell)), href=f"#{cell}")


def number(value: float | None) -> str:
    """Two digits."""
    return "not a number" if value is None else f"{value:.2g}"


def percent(share: float | None) -> str:
    """A share of the tolerance; what is far beyond it, as a multiple."""
    if share is None:
        return "not a number"
    return f"{100 * share:.2g} %" if share < 10 else f"{share:,.0f} times"
