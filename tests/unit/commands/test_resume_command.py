"""`resume` reports before a heavy import: nothing to do, another driver, the changes."""

import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from report_case import run_folder

import streamppo
from streamppo import cli
from streamppo.commands import run_argument
from streamppo.commands.checks import check
from streamppo.config import diff
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver.run_folder import driver_lock
from streamppo.telemetry import metrics_file

UPDATES = 24
HEAVY = ("streamppo.loop", "ray", "torch")


def files(run: Path) -> dict[str, bytes]:
    return {str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.is_file()}


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished run, where nothing heavy can be imported."""
    folder = run_folder(tmp_path / "math", math_config(f"updates={UPDATES}"), updates=UPDATES)
    for path in (folder / "final" / "config.json", folder / "checkpoints" / f"{UPDATES:08d}" / "manifest.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    monkeypatch.setattr(check, "refuse", lambda config: None)
    monkeypatch.delattr(streamppo, "loop", raising=False)
    for name in HEAVY:
        monkeypatch.setitem(sys.modules, name, None)
    return folder


@pytest.mark.parametrize(
    "words", [(), (f"updates={UPDATES}",), ("updates=3", "evaluation.prompts=7"), ("learner.lr=1e-5",)]
)
def test_a_complete_run_is_resumed_with_a_sentence_and_stays_as_it_is(
    run: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(run)
    assert cli.main(["resume", str(run), *words]) == 0
    (said,) = capsys.readouterr().out.splitlines()
    assert f"nothing to do, and nothing is changed: all {UPDATES} updates are made" in said
    assert files(run) == before


def without_last_line(run: Path) -> None:
    path = run / metrics_file.METRICS
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def without_a_line(run: Path) -> None:
    path = run / metrics_file.METRICS
    kept = [line for line in path.read_text().splitlines(keepends=True) if '"update": 3,' not in line]
    path.write_text("".join(kept))


@pytest.mark.parametrize(
    "missing",
    [
        without_last_line,
        without_a_line,
        lambda run: (run / metrics_file.METRICS).unlink(),
        lambda run: shutil.rmtree(run / "final"),
        lambda run: shutil.rmtree(run / "checkpoints"),
    ],
)
def test_a_run_that_lacks_anything_goes_on(
    run: Path, missing: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    missing(run)
    with pytest.raises(ImportError):
        cli.main(["resume", str(run)])
    assert "nothing to do" not in capsys.readouterr().out


def test_what_overrides_change_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ImportError):
        cli.main(["resume", str(run), "updates=30", "learner.lr=0.5", "queue.max_lag=1"])
    said = capsys.readouterr().out
    assert re.fullmatch(r"updates: 24 -> 30\nlearner\.lr: [\d.e-]+ -> 0\.5\n", said)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("name=other", "a run keeps its name, 'math': fork it under another name"),
        ("model.path=other", "a run keeps its model.path: it was 'model', and cannot become 'other'"),
    ],
)
def test_a_change_of_what_a_run_keeps_is_a_mistake_and_is_not_said_to_be_made(
    run: Path, override: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "journal.sqlite").touch()
    before = files(run)
    assert cli.main(["resume", str(run), "updates=30", override]) == 2
    shown = capsys.readouterr()
    assert said in shown.err and not shown.out and files(run) == before


def test_a_second_run_of_a_name_may_be_called_as_its_folder(run: Path) -> None:
    folder = run.rename(run.with_name("math-2"))
    config = configfile.load(folder / configfile.CONFIG, ["name=math-2"])
    assert run_argument.changes(folder, config) == ['name: "math" -> "math-2"']


def test_overrides_that_change_nothing_are_said_to(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without_last_line(run)
    with pytest.raises(ImportError):
        cli.main(["resume", str(run), f"updates={UPDATES}"])
    assert capsys.readouterr().out == f"updates={UPDATES}: the run has this configuration already\n"


def test_another_driver_is_found_before_anything_else(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with driver_lock(run):
        assert cli.main(["resume", str(run), "updates=30"]) == 1
    assert capsys.readouterr().err.strip().endswith("this run is already running, in another process")


def test_a_kind_that_changes_is_described_with_its_fields(math_config: Callable[..., Config]) -> None:
    lines = diff.describe_changes(
        math_config(), math_config("algorithm.advantage.kind=grpo", "queue.samples_per_prompt=4")
    )
    assert "algorithm.advantage.gamma: 1.0 -> none" in lines
    assert any(line.startswith("algorithm.advantage") and "grpo" in line for line in lines)
