"""Nothing that a reward's module begins keeps a command alive after its last line; the exit code is the command's."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MATH, REPOSITORY

WITHIN_S = 60.0
HELD = {
    "a thread in the module": "def wait():\n    time.sleep(1000)\nthreading.Thread(target=wait).start()\n",
    "a thread in a library": "threading.Thread(target=time.sleep, args=(1000,)).start()\n",
    "a timer": "threading.Timer(1000, print).start()\n",
    "an executor": "import concurrent.futures as futures\nfutures.ThreadPoolExecutor(1).submit(time.sleep, 1000)\n",
    "a process": "import multiprocessing\n"
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(1000,)).start()\n",
    "an exit hook": "import atexit\natexit.register(time.sleep, 1000)\n",
}


def ended(folder: Path, what: str, *words: str, before: str = "") -> "subprocess.CompletedProcess[str]":
    """What a command says, and its exit code, with a reward whose module has begun something."""
    (folder / "score.py").write_text(
        f"import threading, time\n{HELD[what]}def score(trajectory, **columns):\n    return 1.0\n"
    )
    program = (
        f"{before}from streamppo.commands import end; end.HOOKS_S = 1.0; from streamppo.__main__ import main; main()"
    )
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, *words, "reward.function=score.py:score"],
        cwd=folder,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert "is not waited for" in done.stderr and time.monotonic() - begin < WITHIN_S
    return done


@pytest.mark.sampled(1)
@pytest.mark.parametrize("what", HELD)
def test_a_command_ends_whatever_a_rewards_module_has_begun(tmp_path: Path, what: str) -> None:
    done = ended(tmp_path, what, "check", str(MATH), "cluster.cpus=1", "rollout.actors=8")
    assert (done.returncode, bool(re.search(r"[1-9]\d* errors?, ", done.stdout))) == (1, True), done.stderr


@pytest.mark.slow
def test_a_good_run_ends_too(tmp_path: Path) -> None:
    """The driver imports the reward itself, before its loop."""
    loop = "from streamppo import loop; loop.run = lambda *_, **__: print('all updates are made') or 0\n"
    done = ended(tmp_path, "a thread in the module", "run", str(MATH), before=loop)
    assert (done.returncode, "all updates are made" in done.stdout) == (0, True), done.stderr
