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

pytestmark = [pytest.mark.process, pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

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
if kind == "forks":
    while True:
        if os.fork():
            os._exit(0)
        time.sleep(0.02)
time.sleep(600)
"""
KINDS = ("sleeps", "stopped", "ignores", "daemon", "session", "parent", "forks")


@contextmanager
def sleeper(folder: Path, kind: str, mark: str) -> Iterator[None]:
    """A marked process of this kind, ready in the block."""
    pid = folder / f"{kind}.pid"
    command = [sys.executable, "-S", "-c", SLEEPER, kind, str(pid)]
    with subprocess.Popen(
        command, env={**os.environ, orphans.MARK: mark}, start_new_session=kind == "session"
    ) as process:
        try:
            until(lambda: pid.exists() and pid.read_text() != "")
            yield
        finally:
            process.kill()


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
        with orphans.ends() as mark:
            after.enter_context(sleeper(tmp_path, kind, mark))
            assert living(mark)
        assert not living(mark)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_the_death_of_the_driver_ends_marked_processes(tmp_path: Path, kind: str) -> None:
    script = (
        "import sys, time\nfrom streamppo.driver.ray import orphans\n"
        "with orphans.ends() as mark:\n    print(mark, flush=True)\n    time.sleep(600)\n"
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
        with orphans.ends() as mark:
            after.enter_context(sleeper(tmp_path, "sleeps", mark))
            assert living(mark)
        assert not living(mark)


def test_without_a_descriptor_of_the_driver_its_death_is_seen_though_a_fork_of_it_lives(tmp_path: Path) -> None:
    (tmp_path / "watcher.py").write_text(REFUSED.format(number=errno.ENOSYS, file=orphans.__file__))
    script = (
        "import os, sys, time\nfrom streamppo.driver.ray import orphans\n"
        f"orphans.__file__ = {str(tmp_path / 'watcher.py')!r}\n"
        "with orphans.ends() as mark:\n    fork = os.fork()\n    if fork:\n        print(mark, fork, flush=True)\n"
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


def living(mark: str) -> list[int]:
    found: list[int] = []
    for pid in orphans.marked_processes(mark):
        with suppress(psutil.Error):
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
    return found
