"""`streamppo bench` measures in rounds, and reports slower costs at the machine's present speed."""

from pathlib import Path

import msgspec
import pytest

from streamppo import cli
from streamppo.commands.start import bench
from streamppo.commands.start.bench import BenchResult
from streamppo.errors import RunError

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
    monkeypatch.setattr(bench, "SCRIPTS", folder)
    monkeypatch.setattr(bench, "REFERENCE", 1000)
    return folder


def result(reference_ms: float = 10.0, **costs: list[float]) -> BenchResult:
    return BenchResult({}, [reference_ms], costs)


def test_every_part_is_measured_in_each_round_and_written_with_the_machine(
    scripts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    assert bench.bench([("one.py", "a"), ("one.py", "b")], 3, out, None) == 0
    found = bench.read(out)
    assert found.costs == {"a": [5.0, 3.0, 4.0], "b": [5.0, 3.0, 4.0]} and len(found.reference_ms) == 6
    assert found.machine["commit"] == "abc"
    shown = capsys.readouterr().out
    assert [line.split() for line in shown.splitlines()[:3]] == [
        ["cost", "median", "smallest", "largest"],
        ["a", "4", "3", "5"],
        ["b", "4", "3", "5"],
    ]
    assert "cpu a cpu, commit abc, torch 2.9" in shown


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(("earlier", "code", "word"), [([2.0, 2.5], 1, "slower"), ([2.0, 3.0], 0, "equal")])
def test_the_exit_code_says_if_something_became_slower(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    earlier: list[float],
    code: int,
    word: str,
) -> None:
    monkeypatch.setattr(bench, "_reference_ms", lambda: 10.0)
    path = tmp_path / "earlier.json"
    path.write_bytes(msgspec.json.encode(result(a=earlier, gone=[1.0])))
    assert bench.bench([("one.py", "a")], 3, None, path) == code
    shown = capsys.readouterr().out
    assert word in shown.splitlines()[1] and "not measured now: gone" in shown


def test_slower_is_beyond_the_margin_and_beyond_the_earlier_range() -> None:
    then = result(wide=[8.0, 10.0, 14.0], narrow=[10.0, 10.0, 10.0], fast=[10.0, 11.0], gone=[1.0])
    now = result(wide=[13.0, 13.0, 13.0], narrow=[10.5, 10.6, 10.7], fast=[5.0, 6.0], new=[1.0])
    assert bench.changes(now, then) == {"wide": "equal", "narrow": "equal", "fast": "faster"}
    worse = result(wide=[15.0, 15.5, 16.0], narrow=[11.5, 11.6, 11.7], fast=[9.5, 20.0])
    assert bench.changes(worse, then) == {"wide": "slower", "narrow": "slower", "fast": "equal"}


def test_a_machine_that_is_slower_as_a_whole_makes_nothing_slower() -> None:
    then, now = result(10.0, a=[10.0, 11.0], b=[10.0, 11.0]), result(20.0, a=[20.0, 21.0], b=[30.0, 31.0])
    assert bench.pace(now, then) == 2.0
    assert bench.changes(now, then) == {"a": "equal", "b": "slower"}


def test_a_part_that_fails_and_a_file_that_is_no_result_are_named(scripts: Path, tmp_path: Path) -> None:
    (scripts / "bad.py").write_text("raise SystemExit('no such thing')")
    with pytest.raises(RunError, match=r"bad.py x ended with 1:\nno such thing"):
        bench.measure([("bad.py", "x")], 1)
    for content in (None, "{}", '{"machine": {}, "costs": {"a": 1.0}}'):
        path = tmp_path / "earlier.json"
        if content is not None:
            path.write_text(content)
        with pytest.raises(RunError, match=r"earlier.json: no result of streamppo bench --json"):
            bench.bench([], 1, None, path)


def test_an_installed_package_says_in_a_sentence_that_the_repository_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "SCRIPTS", tmp_path / "benchmarks")
    assert cli.main(["bench"]) == 1
    assert "RunError: streamppo bench needs the repository" in capsys.readouterr().err


@pytest.mark.parametrize("part", bench.PARTS, ids=lambda part: part[0])
def test_every_part_is_a_script_that_knows_its_arguments(part: tuple[str, ...]) -> None:
    text = (bench.SCRIPTS / part[0]).read_text()
    assert '"costs": ' in text
    assert [word for word in part[1:] if word.startswith("--") and f'"{word}"' not in text] == []
