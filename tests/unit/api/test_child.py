"""The process of a run that a script started: mistakes come back as errors, and it ends with the script."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import MATH

import streamppo
from streamppo.api.messages import RunRequest, encode
from streamppo.errors import CheckpointError, ConfigError

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


@pytest.mark.parametrize("start", [streamppo.open, streamppo.resume])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, start: Callable[[Path], object]) -> None:
    with pytest.raises(CheckpointError, match="no run found"):
        start(tmp_path)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("child", [CHILD, ["-c", REPLIES]], ids=["all replies are read", "a reply is not read"])
def test_it_ends_when_the_script_does(child: list[str], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never.toml")
    ours, theirs = socket.socketpair()
    command = [sys.executable, *child, str(theirs.fileno())]
    with theirs, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        ours.sendall(encode(RunRequest(config=str(tmp_path / "never.toml"), runs=str(tmp_path))))
        try:
            if child is not CHILD:
                assert ours.recv(1, socket.MSG_PEEK) == b".", "it has started"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(2.0)
            ours.close()
            assert process.wait(30.0) == -15
        finally:
            process.kill()
