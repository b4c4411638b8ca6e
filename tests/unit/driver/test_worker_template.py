"""A worker that is forked is the process that Ray started, and lives and dies as that process would."""

import importlib
import json
import os
import random
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamppo.driver.ray import worker_template

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")]

FACTS = """
import json, os, resource, signal, sys, warnings
json.dump({
    "arguments": sys.argv, "name": __name__, "path": sys.path, "flags": list(sys.flags), "folder": os.getcwd(),
    "environment": dict(os.environ), "input": sys.stdin.read(), "hash": hash("a text"),
    "limits": [resource.getrlimit(n) for n in sorted(v for k, v in vars(resource).items() if k.startswith("RLIMIT_"))],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "on_signals": [str(signal.getsignal(n)) for n in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP)],
    "oom_score": open("/proc/self/oom_score_adj").read(), "umask": os.umask(0),
    "session": os.getsid(0), "group": os.getpgrp(),
}, sys.stdout)
print("to the error stream", file=sys.stderr)
"""
SLEEPS = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"


@contextmanager
def template(libraries: tuple[str, ...] = (), actors: tuple[str, ...] = (), wait_s: float = 60) -> Iterator[list[str]]:
    """The command of a launcher; the template imports no more than it is told to."""
    with worker_template.running(libraries, actors, wait_s) as python:
        yield shlex.split(python)


def script(folder: Path, text: str) -> str:
    file = folder / "scripts" / "worker.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


def until(true: Callable[[], object], timeout_s: float = 30) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found


def templates() -> list[psutil.Process]:
    """The living template processes that this one has started."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        # It may end at any moment.
        with suppress(psutil.Error):
            found += [child] if worker_template.FORKS in child.cmdline() else []
    return found


@pytest.mark.parametrize("seed", range(4))
def test_a_fork_is_what_python_would_have_started(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    # The driver sets it for all processes.
    monkeypatch.setenv("PYTHONHASHSEED", f"{seed}")
    if seed % 2:
        monkeypatch.setenv("PYTHONSAFEPATH", "1")

    def text() -> str:
        return "".join(draw.choice("aZ 09=\"'\\\n\t$;*é漢😀\udcff") for _ in range(draw.randrange(12)))

    arguments = [script(tmp_path, FACTS), *(text() for _ in range(draw.randrange(6)))]
    variables = {f"V{number}": text() for number in range(draw.randrange(20))}
    environment = {**os.environ, **variables, "LONG": "x" * draw.choice((1, 100_000))}
    blocked = draw.sample([signal.SIGINT, signal.SIGUSR1, signal.SIGTERM], draw.randrange(3))
    score, niceness = int(worker_template.OOM_SCORE.read_text()), draw.randrange(3)
    group = draw.choice((None, 0))

    def prepare() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - seed, hard))
        os.nice(niceness)
        worker_template.OOM_SCORE.write_text(str(score + seed))

    def facts(python: list[str]) -> tuple[dict[str, Any], str]:
        worker = subprocess.Popen(
            [*python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
            preexec_fn=prepare,  # noqa: PLW1509
            process_group=group,
        )
        said, errors = worker.communicate("from standard input", timeout=60)
        assert worker.returncode == 0
        found = json.loads(said)
        return {**found, "group": "its own" if found["group"] == worker.pid else found["group"]}, errors

    with template(("decimal",)) as launcher:
        forked, said = facts(launcher)
    plain, said_too = facts([sys.executable])
    assert forked == plain and said == said_too == "to the error stream\n"


def test_forks_have_what_was_imported_and_actors_modules_the_environment_of_the_first_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("early_module", "late_module"):
        (tmp_path / f"{name}.py").write_text("import os\nSEEN, BY = os.environ.get('OF_RAY'), os.getpid()\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    told = "import os, early_module as e, late_module as l; print(e.SEEN, l.SEEN, os.environ['OF_RAY'], e.BY, l.BY)"
    with template(("early_module",), ("late_module",)) as launcher:
        command = [*launcher, script(tmp_path, told)]
        lines = [
            subprocess.run(
                command, env={**os.environ, "OF_RAY": value}, capture_output=True, text=True, check=True
            ).stdout.split()
            for value in ("first", "second")
        ]
        pid = f"{templates()[0].pid}"
    assert lines == [["None", "first", "first", pid, pid], ["None", "first", "second", pid, pid]]


def test_workers_that_start_at_the_same_time_are_all_forks(tmp_path: Path) -> None:
    command = script(tmp_path, "import os; print(os.getppid(), os.getpid())")
    with template() as launcher, ThreadPoolExecutor(12) as pool:
        said = list(pool.map(lambda _: subprocess.check_output([*launcher, command], text=True).split(), range(12)))
        assert {parent for parent, _ in said} == {f"{templates()[0].pid}"} and len({pid for _, pid in said}) == 12
        until(lambda: not templates()[0].children())


MODULES = {
    "lacks a module": "import no_such_module_anywhere",
    "is no Python": "x ==== 1",
    "ends": "raise SystemExit('no')",
    "is interrupted": "raise KeyboardInterrupt",
    "imports for long": "import time; time.sleep(600)",
    "can fork no more": "import os\ndef fork(): raise BlockingIOError(11, 'no more processes')\nos.fork = fork",
    "dies": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
}
"""What a template meets that can then fork no worker."""


# A launcher that has said what it wants waits for the actors' modules: Ray gives it a minute.
@pytest.mark.parametrize(
    ("what", "of"),
    [(what, of) for what in MODULES for of in ("libraries", "actors") if (what, of) != ("imports for long", "actors")],
)
def test_without_a_template_the_launcher_is_the_worker_itself(
    what: str, of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "module_of_a_library.py").write_text(MODULES[what])
    monkeypatch.syspath_prepend(tmp_path)
    imported = {of: ("module_of_a_library",)}
    with template(**imported, wait_s=0.5 if what == "imports for long" else 60) as launcher:
        for _ in range(2):
            command = [*launcher, script(tmp_path, "import os; print(os.getpid())")]
            with subprocess.Popen(command, stdout=subprocess.PIPE) as worker:
                said, _ = worker.communicate(timeout=60)
            assert int(said) == worker.pid and worker.returncode == 0
        assert len(templates()) == (what in {"can fork no more", "imports for long"})
    assert capfd.readouterr().err == ""


def test_a_worker_whose_folder_is_gone_starts_as_python_would_start_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, command = tmp_path / "folder", script(tmp_path, "print('runs')")
    folder.mkdir()
    with template() as launcher:
        monkeypatch.chdir(folder)
        folder.rmdir()
        assert subprocess.check_output([*launcher, command], text=True) == "runs\n"


def test_forks_draw_other_random_numbers_and_have_one_thread_unless_told_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "import numpy, random, torch; print(numpy.random.random(), random.random(), torch.rand(()).item(), "
    command = script(tmp_path, f"{told}torch.initial_seed(), torch.get_num_threads())")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with template(("numpy", "torch")) as launcher:
        drawn = [subprocess.check_output([*launcher, command], text=True).split() for _ in range(2)]
    assert not any(one == other for one, other in zip(drawn[0][:4], drawn[1][:4], strict=True))
    assert [numbers[4] for numbers in drawn] == ["1", "1"]


def test_a_worker_that_is_killed_while_it_starts_does_not_start_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "module_of_actors.py").write_text("import time; time.sleep(2)")
    monkeypatch.syspath_prepend(tmp_path)
    with template(actors=("module_of_actors",)) as launcher:
        killed = subprocess.Popen([*launcher, script(tmp_path, SLEEPS), str(tmp_path / "pid")])
        time.sleep(0.5)
        killed.kill()
        killed.wait()
        assert subprocess.check_output([*launcher, script(tmp_path, "print('runs')")], text=True) == "runs\n"
    assert not (tmp_path / "pid").exists()


def test_a_launcher_ends_with_its_fork_and_a_fork_outlives_its_template(tmp_path: Path) -> None:
    sleeps, pids = script(tmp_path, SLEEPS), [tmp_path / "a", tmp_path / "b"]
    with template() as launcher:
        workers = [subprocess.Popen([*launcher, sleeps, str(pid)]) for pid in pids]
        first, second = (psutil.Process(int(until(lambda pid=pid: pid.exists() and pid.read_text()))) for pid in pids)
        first.kill()
        assert workers[0].wait(30) == 0
        templates()[0].kill()
        until(lambda: not templates())
    time.sleep(0.2)
    assert second.is_running() and workers[1].poll() is None
    second.kill()
    assert workers[1].wait(30) == 0


def test_a_template_ends_with_its_driver_however_that_ends(tmp_path: Path) -> None:
    driver = "\n".join(
        [
            "import time",
            "from streamppo.driver.ray import worker_template",
            "with worker_template.running((), ()):",
            "    print('runs', flush=True)",
            "    time.sleep(600)",
        ]
    )
    with subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        process.kill()
    until(lambda: not child.is_running())


@pytest.mark.parametrize(
    "message", ["nothing", "a part of a number", "a part", "no JSON", "another JSON", "another secret", "no streams"]
)
def test_a_launcher_that_dies_in_its_request_keeps_no_other_from_its_fork(message: str, tmp_path: Path) -> None:
    def number(value: int) -> bytes:
        return value.to_bytes(worker_template.NUMBER_BYTES)

    start = worker_template._describe_process([script(tmp_path, SLEEPS), str(tmp_path / "pid")])
    whole = json.dumps(["another", start]).encode()
    bodies = {
        "a part": (50, b"{"),
        "no JSON": (3, b"abc"),
        "another JSON": (2, b"{}"),
        "another secret": (len(whole), whole),
        "no streams": (2, b"[]"),
    }
    with template() as launcher:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as channel:
                channel.connect(f"\0{launcher[-3]}")
                if message == "a part of a number":
                    channel.sendall(number(9)[:3])
                elif message != "nothing":
                    length, body = bodies[message]
                    streams = [] if message == "no streams" else [0, 1, 2]
                    socket.send_fds(channel, [number(length)], streams)
                    channel.sendall(body)
        parent = subprocess.check_output([*launcher, script(tmp_path, "import os; print(os.getppid())")], text=True)
        (ours,) = templates()
        assert int(parent) == ours.pid
        assert not (tmp_path / "pid").exists()
        # Standard streams, the channel to the driver and the listener are all that it keeps.
        until(lambda: ours.num_fds() <= 4)
