"""A run on one screen, and all runs of a folder: running, finished, stopped and killed ones."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from io import StringIO
from pathlib import Path

import pytest
from msgspec import structs
from report_case import run_folder
from rich.console import Console

from streamppo import cli
from streamppo.commands.look import summary
from streamppo.config import file as configfile
from streamppo.config.sections import Config, Origin
from streamppo.driver.run_folder import driver_lock
from streamppo.telemetry import metrics_file
from streamppo.telemetry.summary import queue_totals


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    return run_folder(tmp_path / "math", math_config())


def test_a_run_is_told_on_one_screen(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["summary", str(run)]) == 0
    out = capsys.readouterr().out
    assert len(out.splitlines()) <= 24
    rows = {line.split("  ")[0]: line.split()[-1] for line in out.splitlines()}
    assert (rows["outcome"], rows["updates"]) == ("finished", "24")


def test_a_fork_tells_of_which_run_it_is(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = configfile.load(run / configfile.CONFIG)
    origin = Origin(run="/somewhere/first", version=12, digest="ab" * 32)
    configfile.save(structs.replace(config, origin=origin), run)
    assert cli.main(["summary", str(run)]) == 0
    told = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["forked", "of", "first", "at", "version", "12", "(abababababab)"] in told


def test_a_finding_is_told_with_its_advice(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run / metrics_file.METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({**line, "ess": 0.1} if "update" in line else line) + "\n" for line in lines))
    assert cli.main(["summary", str(run)]) == 0
    assert "ESS collapse (update 24): ess is at most 0.10" in capsys.readouterr().out


def evaluated(run: Path, *accuracies: float) -> None:
    """Write an evaluation after every twelve updates, in place of the run's own."""
    path = run / metrics_file.METRICS
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if "evaluation" not in line]
    end = lines.pop()
    for n, accuracy in enumerate(accuracies):
        told = {"accuracy": accuracy, "count": 256, "failed": 0, "versions": [0, 0]}
        lines.append({"evaluation": 12 * n, "wall_s": end["wall_s"], **told})
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, end]))


def test_a_verdict_is_the_first_line_and_a_run_that_fell_is_not_just_finished(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated(run, 0.4, 0.5, 0.0)
    assert cli.main(["summary", str(run)]) == 0
    first, second = (" ".join(line.split()) for line in capsys.readouterr().out.splitlines()[:2])
    assert first == "verdict 0.400 -> 0.000: worse than at the start; best 0.500 at version 12"
    assert second == "outcome finished, worse than at the start"
    assert cli.main(["list", "--runs", str(run.parent)]) == 0
    assert "finished, worse than at the start" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("last", "is_told"), [(0.9, False), (0.0, True)])
def test_a_sign_that_is_over_stands_in_the_summary_of_a_run_that_fell_alone(
    last: float, is_told: bool, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / metrics_file.METRICS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    updates = [line for line in lines if "update" in line]
    begin = [{**line, "ess": 0.1, "update": line["update"]} for line in updates[:20]]
    rest = [{**updates[0], "update": 21 + n} for n in range(20)]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*begin, *rest, lines[-1]]))
    evaluated(run, 0.4, last)
    assert cli.main(["summary", str(run)]) == 0
    assert ("over: ESS collapse (update 20): ess is at most 0.10" in capsys.readouterr().out) == is_told


def test_programs_get_json_of_a_run_without_a_summary_too(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["summary", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["outcome"], found["updates"]) == ("finished", 24)
    rest = {**queue_totals(None), "engines": None, "checksum": "", "seed": 1, "versions": {}}
    (run / "summary.json").write_text(json.dumps({**rest, **found, "updates": 99}))
    assert cli.main(["summary", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["updates"] == 99


def test_runs_are_listed_with_their_state(
    run: Path, math_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("killed", "alive"):
        other = run_folder(run.parent / name, math_config(), updates=4)
        lines = (other / metrics_file.METRICS).read_text().splitlines(keepends=True)
        (other / metrics_file.METRICS).write_text("".join(line for line in lines if '"end"' not in line))
    with driver_lock(run.parent / "alive"):
        assert cli.main(["list", "--runs", str(run.parent)]) == 0
    rows = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert {name: row[1:3] for name, row in rows.items() if name != "run"} == {
        "math": ["finished", "24"],
        "killed": ["killed", "4"],
        "alive": ["running", "4"],
    }


def test_a_run_that_ends_while_it_is_read_is_not_said_to_be_killed(
    run: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    other = run_folder(run.parent / "alive", math_config(), updates=4)
    lines = metrics_file.read(other)[:-1]
    for show in (lambda: summary.current_summary(other)["outcome"], lambda: summary._row(other)[1]):
        with ExitStack() as driver:
            driver.enter_context(driver_lock(other))
            monkeypatch.setattr(metrics_file, "read", lambda _folder, driver=driver: (driver.close(), lines)[1])
            assert show() == "running"
    assert summary._row(other)[1] == "killed"


@pytest.mark.parametrize("columns", [60, 80, 140])
def test_every_run_takes_one_line_also_one_that_failed_with_many_words(
    run: Path, math_config: Callable[..., Config], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    reason = "RunError: " + "the learner was killed by the kernel\x1b[2J for memory " * 9 + "\nsecond line"
    with (run / metrics_file.METRICS).open("a") as file:
        file.write(json.dumps({"end": reason, "wall_s": 99.0}) + "\n")
    (run_folder(run.parent / "odd", math_config(), updates=4) / "summary.json").write_text("no JSON")
    shown = StringIO()
    monkeypatch.setattr(summary, "console", lambda: Console(file=shown, force_terminal=True, color_system=None))
    assert cli.main(["list", "--runs", str(run.parent)]) == 0
    heading, *rows = shown.getvalue().splitlines()
    assert len(rows) == 2 and all(len(row) <= columns for row in (heading, *rows))
    states = {row.split()[0]: row for row in rows}
    assert "RunError:" in states["math"] and "…" in states["math"] and " 24 " in states["math"]
    assert "\x1b" not in states["math"] and "JSON" in states["odd"]


@pytest.mark.parametrize("columns", [20, 40, 60])
def test_a_narrow_terminal_shows_whole_names_and_leaves_other_columns_out(
    run: Path, math_config: Callable[..., Config], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", f"{columns}")
    names = ["math", "math-with-a-larger-lr-1", "math-with-a-larger-lr-2"]
    for name in names[1:]:
        run_folder(run.parent / name, math_config(), updates=4)
    shown = StringIO()
    monkeypatch.setattr(summary, "console", lambda: Console(file=shown, force_terminal=True, color_system=None))
    assert cli.main(["list", "--runs", str(run.parent)]) == 0
    text = shown.getvalue()
    assert all(len(row) <= columns for row in text.splitlines()) and "finished" in text
    if columns == 20:
        text = "".join(row.split(" ")[0] for row in text.splitlines())
    assert all(name in text for name in names)
    assert ("updates" in text) == (columns == 60)


def test_a_folder_without_runs_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "--runs", str(tmp_path)]) == 1
    assert "no run found" in capsys.readouterr().err


def test_a_report_wants_a_run_and_writes_into_its_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report"]) == 2
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"report: {run / 'report.html'}\n"
    assert (run / "report.html").is_file()


def test_several_runs_are_written_where_the_command_says(run: Path, tmp_path: Path) -> None:
    assert cli.main(["report", str(run), str(run), "--to", str(tmp_path / "both.html")]) == 0
    assert (tmp_path / "both.html").is_file()
