"""Nothing that a reward's module begins keeps a command alive after its last line; the exit code is the command's."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import MATH, REPOSITORY

pytestmark = pytest.mark.process

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


@pytest.mark.parametrize("what", HELD)
def test_a_command_ends_whatever_a_rewards_module_has_begun(tmp_path: Path, what: str) -> None:
    (tmp_path / "score.py").write_text(
        f"import threading, time\n{HELD[what]}def score(trajectory, **columns):\n    return 1.0\n"
    )
    words = [str(MATH), "reward.function=score.py:score", "cluster.cpus=1", "rollout.actors=8"]
    program = "from streamppo.commands import end; end.HOOKS_S = 1.0; from streamppo.__main__ import main; main()"
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program, "check", *words],
        cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=WITHIN_S,
    )
    assert (done.returncode, "errors, " in done.stdout) == (1, True), done.stderr
    assert "is not waited for" in done.stderr
    assert time.monotonic() - begin < WITHIN_S
