"""The table of quick benchmarks is measured in rounds, and reports slower costs at the machine's present speed."""

import sys
from pathlib import Path

import msgspec
import pytest
from conftest import REPOSITORY

sys.path.insert(0, str(REPOSITORY))

from benchmarks.cost import quick
from benchmarks.cost.quick import QuickResult

SCRIPT = """
import json, pathlib, sys
count = pathlib.Path({folder!r}) / (sys.argv[1] + ".count")
number = int(count.read_text()) if count.exists() else 0
count.write_text(str(number + 1))
costs = {{sys.argv[1]: {costs}[number]}}
machine = {{"cpu": "a cpu", "versions": {{"torch": "2.9"}}, "commit": "abc"}}
pathlib.Path(sys.argv[sys.argv.index("--json") + 1]).write_text(json.dumps({{"machine": machine, "costs": costs}}))
"""


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of benchmarks with one, whose costs are 5, 3 and 4."""
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "one.py").write_text(SCRIPT.format(folder=str(tmp_path), costs="[5.0, 3.0, 4.0]"))
    monkeypatch.setattr(quick, "SCRIPTS", folder)
    monkeypatch.setattr(quick, "PARTS", [("one.py", "a"), ("one.py", "b")])
    monkeypatch.setattr(quick, "reference_ms", lambda: 10.0)
    return folder


def result(reference_ms: float = 10.0, **costs: list[float]) -> QuickResult:
    return QuickResult({}, [reference_ms], costs)


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(("earlier", "code", "word"), [([2.0, 2.5], 1, "slower"), ([2.0, 3.0], 0, "equal")])
def test_every_part_is_measured_in_each_round_and_the_exit_code_says_if_one_became_slower(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    earlier: list[float],
    code: int,
    word: str,
) -> None:
    before, out = tmp_path / "earlier.json", tmp_path / "out.json"
    before.write_bytes(msgspec.json.encode(result(a=earlier, gone=[1.0])))
    monkeypatch.setattr(sys, "argv", ["quick.py", "--json", str(out), "--compare", str(before)])
    assert quick.main() == code
    found = msgspec.json.decode(out.read_bytes(), type=QuickResult)
    assert found.costs == {"a": [5.0, 3.0, 4.0], "b": [5.0, 3.0, 4.0]} and len(found.reference_ms) == 6
    assert found.machine["commit"] == "abc"
    shown = capsys.readouterr().out
    assert [line.split()[:4] for line in shown.splitlines()[1:3]] == [["a", "4", "3", "5"], ["b", "4", "3", "5"]]
    assert word in shown.splitlines()[1] and "not measured now: gone" in shown


def test_slower_is_beyond_the_margin_and_beyond_the_earlier_range() -> None:
    then = result(wide=[8.0, 10.0, 14.0], narrow=[10.0, 10.0, 10.0], fast=[10.0, 11.0], gone=[1.0])
    now = result(wide=[13.0, 13.0, 13.0], narrow=[10.5, 10.6, 10.7], fast=[5.0, 6.0], new=[1.0])
    assert quick.changes(now, then) == {"wide": "equal", "narrow": "equal", "fast": "faster"}
    worse = result(wide=[15.0, 15.5, 16.0], narrow=[11.5, 11.6, 11.7], fast=[9.5, 20.0])
    assert quick.changes(worse, then) == {"wide": "slower", "narrow": "slower", "fast": "equal"}


def test_a_machine_that_is_slower_as_a_whole_makes_nothing_slower() -> None:
    then, now = result(10.0, a=[10.0, 11.0], b=[10.0, 11.0]), result(20.0, a=[20.0, 21.0], b=[30.0, 31.0])
    assert quick.pace(now, then) == 2.0
    assert quick.changes(now, then) == {"a": "equal", "b": "slower"}


def test_a_part_that_fails_is_named_with_its_output(scripts: Path) -> None:
    (scripts / "bad.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(SystemExit, match=r"bad.py x ended with 1:\nno such thing"):
        quick.measure([("bad.py", "x")], 1)


@pytest.mark.parametrize("part", quick.PARTS, ids=lambda part: part[0])
def test_every_part_is_a_script_that_knows_its_arguments(part: tuple[str, ...]) -> None:
    text = (quick.SCRIPTS / part[0]).read_text()
    assert '"costs": ' in text
    assert [word for word in part[1:] if word.startswith("--") and f'"{word}"' not in text] == []
