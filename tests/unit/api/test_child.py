"""The process of a run that a script started: mistakes come back as errors, and it ends with the script."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from conftest import MATH

import streamppo
from streamppo.api import child, data_rows
from streamppo.api.messages import RewardSource, RunRequest, encode
from streamppo.config import file as configfile
from streamppo.config.task import DataTask
from streamppo.errors import CheckpointError, ConfigError, TaskError
from streamppo.tasks import dataset_files

CHILD = ["-m", "streamppo.api.child"]
REPLIES = (
    "import os, sys; from streamppo.api import child; os.write(int(sys.argv[1]), b'.'); child.main(int(sys.argv[1]))"
)
"""It has sent a reply before it reads the request."""


def test_a_mistake_is_raised_in_the_script_and_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="lrr"):
        streamppo.run(MATH, ["learner.lrr=1"], runs=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_a_reward_that_cannot_be_called_is_refused_before_there_is_a_folder(tmp_path: Path) -> None:
    def score(nothing: object) -> float:
        return 0.0

    score.__module__ = "__main__"
    with pytest.raises(ConfigError, match=r"reward.py:score' takes \(nothing\); it must be one of"):
        streamppo.run(MATH, reward=score, runs=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"learner.lrr": 1}, "config: learner.lrr: unknown field 'lrr': did you mean 'lr'"),
        ({"model": {"path": Path("builtin:tiny")}}, "config: a run has .* or an `.environment.`"),
        ({"model.path": object()}, "config: a field cannot be a object"),
    ],
)
def test_a_configuration_may_be_a_dict_whose_mistakes_are_named_like_those_of_a_file(
    fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        streamppo.run(fields, data=[{"prompt": "1+2="}], runs=tmp_path / "runs")
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_in_rows_of_a_script_names_no_file(tmp_path: Path) -> None:
    def score(trajectory: Any) -> float:
        return 0.0

    fields = {"model.path": "builtin:tiny", "task.answer": ""}
    with pytest.raises(ConfigError) as refused:
        streamppo.run(fields, reward=score, data=[{"prompt": "1+2="}, {"question": "3+4="}], runs=tmp_path / "runs")
    assert str(refused.value).startswith("task: data, row 2: no column 'prompt'; columns are question")
    assert tempfile.gettempdir() not in str(refused.value)


def test_rows_and_a_reward_become_files_of_the_run(tmp_path: Path) -> None:
    data_rows.write([{"prompt": "1+2=", "answer": np.int64(3), "half": "\ud800"}], tmp_path / "given.jsonl")
    source = RewardSource(function="score", source="def score(trajectory): ...")
    request = RunRequest(data=str(tmp_path / "given.jsonl"), reward=source)
    folder = tmp_path / "run"
    folder.mkdir()
    overrides = child._file_overrides(request, folder)
    (tmp_path / "given.jsonl").unlink()
    fields = {"model.path": "builtin:tiny", "rollout": {"engine": "embedded", "max_tokens": 5}, "task.prompt": "prompt"}
    config = configfile.from_fields(fields, overrides)
    assert isinstance(config.task, DataTask)
    ((_, row),) = dataset_files.rows(config.task.sources["data"].data, "train")
    assert row == {"prompt": "1+2=", "answer": 3, "half": "\ud800"}
    assert (folder / configfile.REWARD).read_text() == source.source


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("rows.jsonl", "not a str: the name of a file belongs in task.data"),
        ({"prompt": ["1+2="]}, "not a dict: pass a list with a dict for each row"),
        (pyarrow.table({"prompt": ["1+2="]}), r"not a Table: pass data\.to_pylist\(\)"),
        ([], "data: no rows"),
        ([{"prompt": "1+2="}, "1+2="], "data, row 2: a row must be a mapping"),
        ([{"prompt": object()}], "data, row 1: the column 'prompt' holds values of builtins.object: leave it out"),
        ([{"prompt": date.min}], "data, row 1: JSON has no date: convert it to a text or a number"),
    ],
)
def test_rows_that_a_file_cannot_hold_are_refused(data: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        data_rows.write(data, tmp_path / "data.jsonl")


@pytest.mark.parametrize("start", [streamppo.open, streamppo.resume])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, start: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointError, match="no run found"):
        start(tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("command", [CHILD, ["-c", REPLIES]], ids=["all replies are read", "a reply is not read"])
def test_it_ends_when_the_script_does(command: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never.toml")
    ours, theirs = socket.socketpair()
    arguments = [sys.executable, *command, str(theirs.fileno())]
    with theirs, subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.sendall(encode(RunRequest(config=str(tmp_path / "never.toml"), runs=str(tmp_path))))
        try:
            if command is not CHILD:
                assert ours.recv(1, socket.MSG_PEEK) == b".", "it has started"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.0)
            ours.close()
            assert process.wait(30.0) == -15
        finally:
            process.kill()
