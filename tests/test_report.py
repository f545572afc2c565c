"""Reports about a run: the page contains every cell and every case, the matrix reads back as it was
written."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lockstep import cli
from lockstep.lab import pages, reverts
from lockstep.lab.cells import TABLES, cells

CASE = "sglang-26513"
VOID = {"meta", "br", "wbr", "input"}


class Tags(HTMLParser):
    """Collects ids, links and text of a page, and the tags that are not closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.resources: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if tag == "a" else []
        self.resources += [
            f"{tag} {name}" for name in ("src", "srcset", "data") if name in found
        ] + ([tag] if tag in ("link", "iframe") else [])
        self.open += [] if tag in VOID else [tag]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Runs a few cells and one revert. Returns both documents."""
    folder = tmp_path_factory.mktemp("lab")
    run, kills = folder / "run.json", folder / "kills.json"
    some = ["--recipe", "empty,fork,seeds", "--feature", "dense,head-20,llama"]
    assert (
        cli.main(
            [
                "lab",
                "run",
                *some,
                "--workers",
                "0",
                "--json",
                str(run),
                "--html",
                str(folder / "run.html"),
            ]
        )
        == 0
    )
    assert (
        cli.main(
            [
                "lab",
                "reverts",
                "--name",
                CASE,
                "--workers",
                "0",
                "--json",
                str(kills),
                "--html",
                str(folder / "kills.html"),
            ]
        )
        == 0
    )
    return run, kills


@pytest.mark.parametrize("which", [0, 1])
def test_the_html_page_has_every_cell_and_case(ran: tuple[Path, Path], which: int):
    doc = json.loads(ran[which].read_text())
    text = ran[which].with_suffix(".html").read_text()
    page = Tags(text)
    assert page.open == [] and page.resources == [], "closed, and nothing from elsewhere"
    assert len(page.ids) == len(set(page.ids))
    missing = [link for link in page.links if link.startswith("#") and link[1:] not in page.ids]
    assert not missing
    assert {c["cell"] for c in doc["cells"]} <= set(page.ids)
    wanted = reverts.names() if which == 0 else [CASE]
    assert {f"case-{name}" for name in wanted} <= set(page.ids)
    for cell in doc["cells"]:
        assert cell["command"] in text
        assert all(pages.escape(f["detail"]) in text for f in cell["findings"])


def test_the_case_file_shows_what_was_measured(ran: tuple[Path, Path]):
    kills = json.loads(ran[1].read_text())["kills"]
    (case,) = kills["reverts"]
    assert case["killed"] and {t["checks"] for t in case["trials"]} == {True, False}
    assert all(r["verdict"] == "passed" for r in kills["baseline"].values()), (
        "green without the bug"
    )
    text = ran[1].with_suffix(".html").read_text()
    broken = [f["detail"] for t in case["trials"] for f in t["broken"]]
    assert broken and all(pages.escape(detail) in text for detail in broken)
    for section in (*reverts.SECTIONS, "Measured"):
        assert f"<h4>{section}</h4>" in text, section


def test_lists_code_and_links_of_a_case_file_are_rendered():
    made = pages.prose("First,\nof all.\n1. one `x < y`\ngoes on\n2. two\n\nSee a/b#12.")
    assert made == (
        "First, of all.\n1. one <code>x &lt; y</code> goes on\n2. two\n\n"
        'See <a href="https://github.com/a/b/issues/12" rel="noreferrer">a/b#12</a>.'
    )


def read(text: str) -> dict[str, str]:
    """Returns cell -> verdict, as a reader of the page would understand it."""
    meaning, columns = (
        {symbol: verdict for verdict, symbol in pages.SYMBOLS.items()},
        {table.column for table in TABLES},
    )
    out: dict[str, str] = {}
    backend, header = "", list[str]()
    for line in text.splitlines():
        fields = (
            [field.strip() for field in line.strip("|").split("|")] if line.startswith("|") else []
        )
        if line.startswith("## "):
            backend = line[3:]
        elif fields and fields[0] in columns:
            header = fields[1:]
        elif fields and not fields[0].startswith("-"):
            out |= {
                f"{backend}/{r}/{fields[0]}": meaning[s]
                for r, s in zip(header, fields[1:], strict=True)
                if s
            }
    return out


def test_the_matrix_page_contains_every_verdict():
    verdicts = pages.promised(["cpu", "reference"])
    first, second, third = list(verdicts)[:3]
    verdicts |= {
        first: ("failed", "off"),
        second: ("known", "a cause"),
        third: ("refused", "a reason"),
    }
    assert read(pages.matrix_page(verdicts)) == {str(c): v for c, (v, _) in verdicts.items()}


def test_known_failures_have_a_page():
    assert "There are none" in pages.markdown({}, {})["known-failures.md"]
    page = pages.markdown({}, {"cpu/decode/dense": "a cause"})["known-failures.md"]
    assert "| `cpu/decode/dense` | a cause |" in page


def full_document(folder: Path) -> Path:
    """Writes a document in which every cell has its promised verdict."""
    kept = [
        {"cell": str(c), "verdict": v, "reason": r}
        for c, (v, r) in pages.promised(["cpu", "reference"]).items()
    ]
    path = folder / "full.json"
    path.write_text(
        json.dumps({"cells": kept, "environment": {}, "summary": {}, "quick": False, "revert": ""})
    )
    return path


def test_check_notices_a_stale_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    where, source = ["--docs", str(tmp_path)], ["--from", str(full_document(tmp_path))]
    assert cli.main(["lab", "matrix", "--check", *where]) == 1, "not there yet"
    assert cli.main(["lab", "matrix", *where, *source]) == 0
    assert cli.main(["lab", "matrix", "--check", *where]) == 0
    assert cli.main(["lab", "matrix", "--check", *where, *source]) == 0
    page = tmp_path / "matrix.md"
    page.write_text(page.read_text().replace("✓", "✗", 1))
    capsys.readouterr()
    assert cli.main(["lab", "matrix", "--check", *where]) == 1
    assert "matrix.md:" in capsys.readouterr().out


def test_the_matrix_is_not_written_from_a_partial_or_quick_run(
    ran: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["lab", "matrix", "--docs", str(tmp_path), "--from", str(ran[0])]) == 2
    assert f"of {len(cells(['cpu', 'reference']))} cells" in capsys.readouterr().err
    assert cli.main(["lab", "matrix", "--docs", str(tmp_path), "--from", str(ran[1])]) == 2
    assert "a quick run" in capsys.readouterr().err


def test_the_committed_pages_claim_only_what_this_code_supports(capsys: pytest.CaptureFixture[str]):
    docs = Path(__file__).parent.parent / "docs"
    code = cli.main(["lab", "matrix", "--check", "--docs", str(docs)])
    assert code == 0, capsys.readouterr().out
