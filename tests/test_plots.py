"""The pictures of docs/: those of tools/plots.py are what the committed results give, and every SVG
is shown in a document, with words for who does not see it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT / "tools"))
import picture  # noqa: E402
import plots  # noqa: E402


def test_the_committed_pictures_match_the_results():
    run = [sys.executable, "tools/plots.py", "--check"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "before", "after", "files"),
    [
        ("engine-h200.json", '"step_ms": 4.9', '"step_ms": 3.9', {"engine-h200-steps.svg"}),
        (
            "attention-h200.json",
            '"commit": "ea06619"',
            '"commit": "0000000"',
            {"attention-decode-h200.svg", "attention-prefill-h200.svg"},
        ),
    ],
)
def test_a_result_that_changes_without_its_pictures_is_found(
    name: str,
    before: str,
    after: str,
    files: set[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for path in plots.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    text = json.dumps(json.loads((plots.RESULTS / name).read_text("utf-8")))
    assert before in text
    (tmp_path / name).unlink()
    (tmp_path / name).write_text(text.replace(before, after), "utf-8")
    monkeypatch.setattr(plots, "RESULTS", tmp_path)
    assert plots.main(["--check"]) == 1
    assert set(re.findall(r"docs/(\S+\.svg)", capsys.readouterr().err)) == files


def test_a_missed_target_is_counted_and_drawn_hatched():
    reached = picture.Bar("a", 2.0, "2.0", "", target=1.0)
    missed = picture.Bar("b", 0.5, "0.5", "", target=1.0)
    assert picture.verdict([reached]) == "every target is reached"
    assert picture.verdict([reached, missed]) == "1 of 2 targets are missed"

    def draw(axes: picture.Axes) -> picture.Frame:
        picture.draw_bars(axes, [reached, missed], "x")
        hatches = [patch.get_hatch() for patch in axes.patches]
        assert hatches == [None, "////"]
        return picture.Frame("title", "source")

    drawn = picture.Picture("some.svg", 2.0, draw)
    assert picture.render(drawn) == picture.render(drawn)


def test_figures_that_no_result_contains_are_stated_in_the_document():
    text = " ".join((DOCS / "performance.md").read_text("utf-8").split())
    stated = plots.STATED
    said = [f"{entry['floor']:,}" for entry in stated["throughput"]["models"]]
    for entry in stated["steps"]:
        share = entry.get("target_share")
        said.append(f"{entry['target_ms']} ms" if share is None else picture.percent(share))
    said += re.findall(r"[\w.-]*\d[\w.]+", stated["decode"]["peers"] + stated["throughput"]["peer"])
    assert len(said) == 9
    assert [word for word in said if word not in text] == []


def test_every_picture_is_shown_with_alt_text():
    documents = [ROOT / "README.md", *DOCS.rglob("*.md")]
    shown: set[Path] = set()
    for document in documents:
        text = document.read_text("utf-8")
        for alt, target in re.findall(r"!\[([^\]]*)\]\(([^)]+\.svg)\)", text):
            path = (document.parent / target).resolve()
            assert path.exists(), f"{document}: {target}"
            assert len(alt.split()) > 2, f"{document}: {target} needs words"
            shown.add(path)
    assert shown == set(DOCS.glob("*.svg"))
    assert {DOCS / drawn.file for drawn in plots.PICTURES} <= shown
