"""A disk that is full or read-only: the reason names the file, and hides no other reason."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import MATH
from safetensors.torch import save_file

from streamppo.cli import main
from streamppo.errors import ModelError, RunError
from streamppo.learner.model import hf_files
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.record import RunRecord
from streamppo.types import UpdateReport

METRICS = {"reward": 0.5, "entropy": 1.0, "ess": 1.0, "lag_mean": 0.0, "wait_s": 0.0, "update_s": 1.0, "push_ms": 1.0}


def report(version: int) -> UpdateReport:
    return UpdateReport(
        version=version, metrics={**METRICS, "tokens_trained": 1.0, "tokens_too_old": 0.0}, lag_histogram={0: 1}
    )


def record_of(folder: Path) -> RunRecord:
    return RunRecord(folder, started=0.0, seed=1, updates=9)


def test_metrics_that_find_no_room_are_named_and_the_run_goes_on_from_the_last_whole_line(
    tmp_path: Path, logged: pytest.LogCaptureFixture
) -> None:
    record = record_of(tmp_path)
    record.update(report(1))
    # The open file leads to a disk without room from here on.
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, record._file.fileno())
    os.close(full)
    with pytest.raises(RunError, match=r"metrics.jsonl: cannot be written: .*No space left on device"):
        record.update(report(2))
    (tmp_path / "summary.json.tmp").mkdir()
    record.close("RunError: the first reason", None, [])
    assert f"{tmp_path}/summary.json: cannot be written" in logged.text
    again = record_of(tmp_path)
    again._file.close()
    assert again.version == 1


def test_a_summary_that_cannot_be_written_is_an_error_where_there_was_no_other(tmp_path: Path) -> None:
    record = record_of(tmp_path)
    record.update(report(1))
    (tmp_path / "summary.json").mkdir()
    with pytest.raises(RunError, match=r"summary.json: cannot be written: .*[Dd]irectory"):
        record.close(FINISHED, None, [])
    (tmp_path / "summary.json").rmdir()
    record_of(tmp_path).close(FINISHED, None, [])
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == FINISHED


@pytest.mark.parametrize("place", ["/proc/runs", "a file"])
def test_a_run_that_finds_no_place_says_so_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str
) -> None:
    """No permissions: they would not hold a superuser back."""
    (tmp_path / "a file").write_text("")
    runs = tmp_path / place
    assert main(["run", str(MATH), "--runs", str(runs)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"streamppo: RunError: {runs}/math: cannot be written: ")


class Stub:
    """A model whose weights are refused, by the library that writes them and in its own way."""

    config = SimpleNamespace()

    def save_pretrained(self, folder: Path, **_: object) -> None:
        (folder / "model.safetensors").mkdir(parents=True)
        save_file({"weight": torch.zeros(3)}, folder / "model.safetensors")


def test_a_model_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    stub: Any = Stub()
    with pytest.raises(ModelError, match=r"final: cannot be written: .*directory"):
        hf_files.write(stub, None, tmp_path / "final")
    assert not (tmp_path / "final").exists()
