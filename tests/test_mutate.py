"""Mutants are drawn by a seed, tried in copies, killed or left alive, and nothing else is
changed."""

from __future__ import annotations

import difflib
import json
import subprocess
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep import cli
from lockstep.lab import cells
from lockstep.lab.mutate import campaign, draw, pool
from lockstep.lab.mutate.draw import Mutant
from lockstep.types import RuleError

ROOT = Path(__file__).resolve().parent.parent

TOY = '''"""A toy."""

from __future__ import annotations

START: int | None = 3


def clip(x: int, top: int | None) -> int:
    if x > top:
        return top
    return x


def double(x):
    return (
        x
        * 2
    )


def hidden(x):
    return x + START


def countdown(n):
    while n:
        n -= 1
    return n
'''

TOY_TESTS = '''"""Tests of the toy."""

import subprocess
import sys

from lockstep import toy


def test_clip():
    assert [toy.clip(x, 2) for x in (1, 2, 3)] == [1, 2, 2]


def test_double():
    assert toy.double(4) == 8


def test_countdown():
    assert toy.countdown(5) == 0


def test_hidden():
    code = "from lockstep.toy import hidden; assert hidden(1) == 4"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_red():
    assert toy.double(1) == 3
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with one module and its tests."""
    root = tmp_path_factory.mktemp("toy")
    for name, text in {
        "lockstep/__init__.py": "",
        "lockstep/toy.py": TOY,
        "tests/test_toy.py": TOY_TESTS,
        "pyproject.toml": "",
    }.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    return root


@pytest.fixture(scope="module")
def crew(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> pool.Crew:
    """Worker processes over the toy repository."""
    return pool.Crew(toy, tmp_path_factory.mktemp("work"), 2, warm=())


@pytest.fixture(scope="module")
def reached(crew: pool.Crew) -> campaign.Reach:
    """Which unit of the toy reaches which lines."""
    units, files = campaign.measure(crew, ["tests/test_toy.py"])
    assert files == {"tests/test_toy.py", "lockstep/__init__.py", "lockstep/toy.py"}
    return campaign.Reach({u.name.rpartition("::")[2]: u for u in units})


def mutant(
    root: Path, operator: str, line: int, file: str = "lockstep/toy.py", nth: int = 0
) -> Mutant:
    """Returns the nth mutant of an operator on a line."""
    text = (root / file).read_text()
    found = [p for p in draw.places(file, text) if (p.operator, p.line) == (operator, line)]
    made = draw.make("toy", found[nth], text)
    assert made is not None
    return made


def line_of(text: str, source: str = TOY) -> int:
    """Returns the line number at which a text first occurs; 1 is the first line."""
    return source[: source.index(text)].count("\n") + 1


def test_a_draw_of_mutants_is_a_function_of_its_seed_and_has_one_per_line():
    first, again, other = (draw.draw(["plan.bucket"], ROOT, seed, 6) for seed in (3, 3, 4))
    assert first == again and [m.id for m in first] != [m.id for m in other]
    assert len({(m.file, m.line) for m in first}) == 6 == len({m.id for m in first})
    for m in first:
        text = (ROOT / m.file).read_text()
        changed = draw.combined([m], ROOT)[m.file]
        pair = text.splitlines(), changed.splitlines(), f"a/{m.file}", f"b/{m.file}"
        assert "\n".join(difflib.unified_diff(*pair, lineterm="")) == m.diff
        compile(changed, m.file, "exec")


def test_files_can_be_left_out_of_a_draw():
    files = {m.file for m in draw.draw(["kv"], ROOT, 3, 30, ("pool.py", "prefix"))}
    assert files == {"lockstep/kv/tables.py"}


def test_an_edit_elsewhere_leaves_a_drawn_mutant_in_the_draw(toy: Path, tmp_path: Path):
    (tmp_path / "lockstep").mkdir()
    (tmp_path / "lockstep/toy.py").write_text("FIRST = 1\n\n\n" + TOY)
    before, after = (draw.draw(["toy"], root, 1, 3) for root in (toy, tmp_path))
    assert len(before) == 3 and len({m.id for m in before} & {m.id for m in after}) >= 2


def test_annotations_are_not_mutated(toy: Path):
    lines = [p.line for p in draw.places("lockstep/toy.py", TOY)]
    assert line_of("def clip") not in lines
    assert line_of("START:") in lines, "its value is one"


def test_the_id_of_a_mutant_stays_when_lines_above_it_and_comments_change(toy: Path):
    moved = TOY.replace('"""A toy."""', '"""A toy.\n\nWith more to say.\n"""')
    moved = moved.replace("return top", "return top  # not x")
    (place,) = (
        p for p in draw.places("toy.py", moved) if p.operator == "ReplaceComparisonOperator_Gt_GtE"
    )
    (before,) = (
        p for p in draw.places("toy.py", TOY) if p.operator == "ReplaceComparisonOperator_Gt_GtE"
    )
    one, two = draw.make("toy", before, TOY), draw.make("toy", place, moved)
    assert one is not None and two is not None
    assert (one.id, one.line + 3) == (two.id, two.line)
    equal = "a = 1\nb = 2\na = 1\n"
    made = [draw.make("equal", place, equal) for place in draw.places("equal.py", equal)]
    assert len({m.id for m in made if m is not None}) == len(made) == 6, "equal statements count"


def test_no_two_mutants_change_the_same_line_and_all_can_share_a_tree(tmp_path: Path):
    """A loop over several lines becomes a loop over nothing, and what was on those lines is
    gone."""
    (tmp_path / "lockstep").mkdir()
    loop = "def total():\n    for x in (\n        1,\n        2,\n    ):\n        print(x + 3)\n"
    (tmp_path / "lockstep/loop.py").write_text(loop)
    for seed in range(4):
        drawn = draw.draw(["loop", "lockstep/loop.py"], tmp_path, seed, 9)
        lines = [at for m in drawn for at in m.changed]
        assert len(lines) == len(set(lines)) and lines, "whichever way a file is named"
        compile(draw.combined(drawn, tmp_path)["lockstep/loop.py"], "loop.py", "exec")
    whole = mutant(tmp_path, "ZeroIterationForLoop", 2, "lockstep/loop.py")
    assert sorted(line for _, line in whole.changed) == [1, 2, 3, 4]


def test_coverage_names_the_tests_that_reach_a_line_but_no_failing_ones(reached: campaign.Reach):
    assert {name: u.outcome for name, u in reached.units.items() if u.outcome != "passed"} == {
        "test_red": "failed"
    }
    names = [u.name.rpartition("::")[2] for u in reached.of("lockstep/toy.py", line_of("* 2"))]
    assert names == ["test_double"]
    for line in (line_of("x + START"), line_of("START:")):
        unseen = {u.name.rpartition("::")[2] for u in reached.of("lockstep/toy.py", line)}
        assert unseen == {"test_clip", "test_double", "test_countdown"}, (
            "a line that nobody is seen at, in a process of its own or at import: all of the file"
        )


def test_a_coverage_map_is_kept_until_a_file_that_it_reached_changes(
    toy: Path, crew: pool.Crew, tmp_path: Path
):
    asked, sources = {"toy": ["tests/test_toy.py"]}, pool.digests(toy)
    measured = []

    class Counted(campaign.Reach):
        def save(self, group: list[str], *rest: Any) -> None:
            measured.append(group)
            super().save(group, *rest)

    for changes, times in (
        ({}, 1),
        ({}, 1),
        ({"lockstep/else.py": "x"}, 1),
        ({"lockstep/toy.py": "x"}, 2),
    ):
        found = Counted({}, tmp_path, {**sources, **changes})
        found.load(asked, crew)
        assert len(found.units) == 5 and len(measured) == times


def test_a_stale_coverage_map_drops_the_lines_of_changed_files_but_keeps_their_tests(
    toy: Path, reached: campaign.Reach, tmp_path: Path
):
    asked = ["tests/test_toy.py"]
    units, sources = list(reached.units.values()), pool.digests(toy)
    campaign.Reach({}, tmp_path, sources).save(
        asked, units, ["lockstep/toy.py", "tests/test_toy.py"]
    )
    moved = {**sources, "lockstep/toy.py": "other"}
    store = campaign.Reach({}, tmp_path, moved, stale=True)
    kept = campaign.Reach({u.name: u for u in store.kept(asked) or ()})
    names = {u.name.rpartition("::")[2] for u in kept.of("lockstep/toy.py", line_of("* 2"))}
    assert names == {"test_clip", "test_double", "test_countdown"}
    assert replace(store, stale=False).kept(asked) is None
    assert (
        campaign.Reach({}, tmp_path, {**moved, "tests/test_toy.py": "x"}, True).kept(asked) is None
    )


def test_mutants_are_killed_hang_or_survive_and_kills_that_coverage_missed_are_found(
    toy: Path,
    crew: pool.Crew,
    reached: campaign.Reach,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(pool, "HANG_S", 3.0)
    doubled = mutant(toy, "NumberReplacer", line_of("* 2"))
    endless = mutant(toy, "NumberReplacer", line_of("n -= 1"), nth=1)
    equal = mutant(toy, "ReplaceComparisonOperator_Gt_GtE", line_of("if x > top"))
    unseen = mutant(toy, "ReplaceBinaryOperator_Add_Sub", line_of("x + START"))
    units = campaign.Reach({u.name: u for u in reached.units.values()})
    journal = campaign.Journal(tmp_path / "journal.jsonl")
    play = campaign.Campaign(toy, [doubled, endless, equal, unseen], units, journal, crew)
    play.alone()
    assert journal.killer(doubled.id) == "tests/test_toy.py::test_double"
    assert "assert 12 == 8" in journal.said[doubled.id]["tests/test_toy.py::test_double"]
    assert journal.killer(endless.id) == "tests/test_toy.py::test_countdown"
    assert journal.said[endless.id]["tests/test_toy.py::test_countdown"].startswith("hangs")
    assert [m.id for m in play.survivors()] == [equal.id, unseen.id]
    assert len(play.rest()) == 3, "what only one of them has met is asked again"
    play.together()
    assert journal.killer(unseen.id) == "tests/test_toy.py::test_hidden"
    assert [m.id for m in play.survivors()] == [equal.id]
    play.confirm()
    assert [m.id for m in play.survivors()] == [equal.id], "no kill was a mistake"
    assert (toy / "lockstep/toy.py").read_text() == TOY, "the repository is as it was"
    again = campaign.Campaign(toy, play.mutants, units, campaign.Journal(journal.path), crew)
    assert again.todo() == [] and again.journal.said == journal.said and again.rest() == [], (
        "a run that was ended goes on where it was"
    )


def test_an_error_ends_the_running_jobs_and_their_results_are_unknown(toy: Path, tmp_path: Path):
    """What a job had reported when the user ended the run used to be taken for its whole report."""
    crew, begun = pool.Crew(toy, tmp_path, 2, warm=()), threading.Event()
    ended = list[str]()
    changes = draw.combined([mutant(toy, "NumberReplacer", line_of("n -= 1"), nth=1)], toy)

    def work(endless: bool) -> None:
        if not endless:
            begun.wait()
            raise KeyboardInterrupt
        begun.set()
        try:
            crew.run(pool.Job(units=["tests/test_toy.py::test_countdown"], changes=changes))
        except RuntimeError as error:
            ended.append(str(error))

    with pytest.raises(KeyboardInterrupt):
        list(crew.map(work, [False, True]))
    assert ended == ["the run was stopped: the job's outcome is unknown"]


def test_a_kill_by_a_test_that_fails_anyway_does_not_count(
    toy: Path, crew: pool.Crew, reached: campaign.Reach, tmp_path: Path
):
    units = campaign.Reach({u.name: u for u in reached.units.values()})
    journal = campaign.Journal(tmp_path / "journal.jsonl")
    doubled = mutant(toy, "NumberReplacer", line_of("* 2"))
    journal.note(doubled.id, {"tests/test_toy.py::test_red": "assert 2 == 3"})
    play = campaign.Campaign(toy, [doubled], units, journal, crew)
    assert play.survivors() == []
    play.confirm()
    assert play.survivors() == [doubled]


def test_a_mutant_of_the_engine_is_killed_by_its_test_and_a_neutral_one_survives(tmp_path: Path):
    file, name = (
        "lockstep/kv/tables.py",
        "tests/test_kv.py::test_pages_are_taken_all_or_none_and_the_null_page_never",
    )
    text = (ROOT / file).read_text()
    killed = mutant(ROOT, "NumberReplacer", line_of("self._free = list(range(", text), file, nth=1)
    assert "num_pages - 0" in killed.diff
    silent = Mutant(
        **{
            **vars(killed),
            "id": "silent",
            "start": len(text),
            "stop": len(text),
            "text": "\nNOBODY_READS_THIS = 1\n",
        }
    )
    units = campaign.Reach({name: campaign.Unit(name, 1.0, "passed", {file: [killed.line]})})
    journal = campaign.Journal(tmp_path / "journal.jsonl")
    crew = pool.Crew(ROOT, tmp_path, 1, warm=("torch",))
    play = campaign.Campaign(ROOT, [killed, silent], units, journal, crew)
    play.alone()
    assert [journal.killer(m.id) for m in (killed, silent)] == [name, ""]
    assert play.todo() == [] and play.survivors() == [silent]
    assert (ROOT / file).read_text() == text


def test_the_cells_that_compile_every_kernel_exist():
    every = {str(cell) for cell in cells.cells(["cpu"])}
    assert {f"cpu/{cell}" for cell in campaign.WARM_CELLS} <= every


def test_kill_shares_are_by_module_and_leave_out_mutants_that_cannot_be_killed():
    judged = ("killed", "killed", "killed", "open", "neutral", "equivalent")
    rows = [{"module": "plan", "verdict": v} for v in judged] + [
        {"module": "kv", "verdict": "equivalent"}
    ]
    found = campaign.count(rows)
    assert found["plan"] == {"killed": 3, "equivalent": 1, "neutral": 1, "open": 1, "share": 0.75}
    assert found["kv"]["share"] is None and found["all"]["equivalent"] == 2


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (
            {"a": {"judgement": "fine", "reason": "x"}},
            "a judgement: equivalent, neutral, open; got .*v.json: a: {'judgement': 'fine'",
        ),
        ({"a": {"judgement": "open", "reason": " "}}, "a verdict has a reason"),
        ({"a": "equivalent"}, "a verdict has a reason, and a judgement"),
    ],
)
def test_a_verdict_needs_a_judgement_and_a_reason(value: object, hint: str, tmp_path: Path):
    (tmp_path / "v.json").write_text(json.dumps(value))
    with pytest.raises(RuleError, match=hint):
        campaign.read_verdicts(tmp_path / "v.json")


def test_lab_mutate_lists_diffs_and_names_an_unknown_module_or_mutant(
    capsys: pytest.CaptureFixture[str],
):
    assert cli.main(["lab", "mutate", "kv.tables", "--count", "2", "--seed", "5", "--list"]) == 0
    said = capsys.readouterr().out
    assert said.count("lockstep/kv/tables.py:") == 2 and said.count("    @@ ") == 2
    assert cli.main(["lab", "mutate", "nothing", "--list"]) == 2
    assert "a module is a package or a file of lockstep" in capsys.readouterr().err
    assert cli.main(["lab", "mutate", "kv.tables", "--mutant", "abc", "--list"]) == 2
    assert "--mutant is an id of this draw; got abc" in capsys.readouterr().err
