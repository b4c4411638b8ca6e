"""Processes that inherited the mark end with the block or its process, wherever they stand; others do not."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from streamppo.driver.ray import orphans

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

SLEEPER = """
import os, signal, subprocess, sys, time
kind = sys.argv[1]
if kind == "ignores":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
if kind == "daemon" and os.fork():
    os._exit(0)
if kind == "session" or kind == "daemon":
    os.setsid() if os.getpid() != os.getsid(0) else None
if kind == "parent":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(sys.argv[2], "w") as file:
    file.write(str(os.getpid()))
if kind == "stopped":
    os.kill(os.getpid(), signal.SIGSTOP)
while kind == "forks" and os.path.exists(sys.argv[2]):
    if os.fork():
        os._exit(0)
    with open(sys.argv[2] + ".lives", "w") as file:
        file.write(str(time.time()))
    time.sleep(float(sys.argv[3]))
time.sleep(0 if kind == "forks" else 600)
"""
KINDS = ("sleeps", "stopped", "ignores", "daemon", "session", "parent", "forks")


@contextmanager
def sleeper(folder: Path, kind: str, mark: str, generation_s: float = 0.02) -> Iterator[None]:
    """A marked process of this kind, ready in the block; one that forks and exits does so every `generation_s`."""
    pid = folder / f"{kind}.pid"
    command = [sys.executable, "-S", "-c", SLEEPER, kind, str(pid), str(generation_s)]
    with subprocess.Popen(
        command, env={**os.environ, orphans.MARK: mark}, start_new_session=kind == "session"
    ) as process:
        try:
            until(lambda: pid.exists() and pid.read_text() != "")
            yield
        finally:
            process.kill()
            pid.unlink(missing_ok=True)


@contextmanager
def stranger() -> Iterator[None]:
    """A process beside, with another value of the mark."""
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    with subprocess.Popen(command, env={**os.environ, orphans.MARK: "another"}) as process:
        yield
        assert process.poll() is None, "a process of another run was ended"
        process.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_the_end_of_the_block_ends_marked_processes_alone(tmp_path: Path, kind: str) -> None:
    with stranger(), ExitStack() as after:
        with orphans.kill_at_end() as mark:
            after.enter_context(sleeper(tmp_path, kind, mark))
            assert living(mark)
        assert not living(mark)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_the_driver_ends_marked_processes(tmp_path: Path, kind: str) -> None:
    script = (
        "import sys, time\nfrom streamppo.driver.ray import orphans\n"
        "with orphans.kill_at_end() as mark:\n    print(mark, flush=True)\n    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        mark = driver.stdout.readline().strip()
        with sleeper(tmp_path, kind, mark):
            (watcher,) = psutil.Process(driver.pid).children()
            until(lambda: ignores(watcher.pid, signal.SIGTERM))
            watcher.terminate()
            assert living(mark)
            driver.kill()
            until(lambda: not living(mark))


REFUSED = """
import os, runpy
def refused(*_):
    raise OSError({number}, os.strerror({number}))
os.pidfd_open = refused
runpy.run_path({file!r}, run_name="__main__")
"""


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_without_a_descriptor_of_the_driver_the_end_of_the_block_is_seen(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watcher.py").write_text(REFUSED.format(number=number, file=orphans.__file__))
    monkeypatch.setattr(orphans, "__file__", str(tmp_path / "watcher.py"))
    with ExitStack() as after:
        with orphans.kill_at_end() as mark:
            after.enter_context(sleeper(tmp_path, "sleeps", mark))
            assert living(mark)
        assert not living(mark)


def test_without_a_descriptor_of_the_driver_its_death_is_seen_though_a_fork_of_it_lives(tmp_path: Path) -> None:
    (tmp_path / "watcher.py").write_text(REFUSED.format(number=errno.ENOSYS, file=orphans.__file__))
    script = (
        "import os, sys, time\nfrom streamppo.driver.ray import orphans\n"
        f"orphans.__file__ = {str(tmp_path / 'watcher.py')!r}\n"
        "with orphans.kill_at_end() as mark:\n    fork = os.fork()\n"
        "    if fork:\n        print(mark, fork, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout
        mark, fork = driver.stdout.readline().split()
        try:
            with sleeper(tmp_path, "sleeps", mark):
                assert living(mark)
                driver.kill()
                until(lambda: not living(mark))
        finally:
            os.kill(int(fork), signal.SIGKILL)


def until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ignores(pid: int, number: int) -> bool:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (mask,) = (line.split()[1] for line in lines if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


SLOW = """
import os, runpy, time
listed = os.listdir
def slowly(*given):
    found = listed(*given)
    time.sleep(0.1)
    return found
os.listdir = slowly
runpy.run_path({file!r}, run_name="__main__")
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("generation_s", [0.0, 0.001, 0.005, 0.02, 0.1])
def test_a_process_that_forks_and_exits_ends_though_a_scan_of_all_processes_takes_longer(
    tmp_path: Path, generation_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "watcher.py").write_text(SLOW.format(file=orphans.__file__))
    monkeypatch.setattr(orphans, "__file__", str(tmp_path / "watcher.py"))
    with ExitStack() as after:
        with orphans.kill_at_end() as mark:
            after.enter_context(sleeper(tmp_path, "forks", mark, generation_s))
            until((tmp_path / "forks.pid.lives").exists)
        # Scans of all processes may miss it: its last sign of life tells.
        last = (tmp_path / "forks.pid.lives").read_text()
        time.sleep(0.5)
        assert (tmp_path / "forks.pid.lives").read_text() == last


def living(mark: str) -> list[int]:
    found: list[int] = []
    for pid in orphans.marked_processes(mark):
        with suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
