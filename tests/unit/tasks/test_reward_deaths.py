"""However an actor ends, or a parent of a reward below it, everything that a reward has begun ends with it."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from conftest import REPOSITORY, SUPPORT

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="prctl is of Linux")]
WITHIN_S = 15.0
MARK = "STREAMPPO_TEST_OF_DEATHS"
WORKER = "streamppo.tasks.rewards.processes.worker"
EVERYTHING = (
    "busy",
    "sleeping",
    "forked",
    "forked away",
    "started",
    "pool",
    "stopped",
    "template stopped",
    "reaper stopped",
    "hung up",
)


@pytest.fixture
def mark() -> Iterator[str]:
    """Everything with it in its environment is of this test, whoever its parent is."""
    given = uuid.uuid4().hex
    yield given
    for one in alive(given):
        with suppress(psutil.Error):
            one.kill()


def alive(mark: str) -> list[psutil.Process]:
    found = list[psutil.Process]()
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, psutil.Error):
            if f"{MARK}={mark}".encode() in path.read_bytes():
                one = psutil.Process(int(path.parent.name))
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one)
    return found


def until(is_so: Callable[[], bool]) -> bool:
    end = time.monotonic() + WITHIN_S
    while not (found := is_so()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def begun(mark: str, function: str, doing: str) -> tuple["subprocess.Popen[bytes]", dict[str, psutil.Process]]:
    """An actor whose reward does so, and the line down to the reward's process."""
    path = os.pathsep.join([str(REPOSITORY), str(SUPPORT)])
    command = [sys.executable, str(SUPPORT / "lasting_rewards.py"), function, doing]
    actor = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path, MARK: mark}, stderr=subprocess.DEVNULL)
    more = {"forked": 1, "forked away": 1, "started": 1, "pool": 2, "template stopped": 1, "reaper stopped": 1}
    wanted = 4 + more.get(doing, 1 if doing == "hung up" else 0)
    assert until(lambda: len(alive(mark)) >= wanted), alive(mark)
    line = {"actor": psutil.Process(actor.pid)}
    for name, of in (("reaper", "actor"), ("template", "reaper"), ("process", "template")):
        line[name] = next(one for one in line[of].children() if WORKER in one.cmdline())
    stopped = {"stopped": "process", "template stopped": "template", "reaper stopped": "reaper"}.get(doing)
    assert stopped is None or until(lambda: line[stopped].status() == psutil.STATUS_STOPPED)
    # A loop that spins, a fork of a fork.
    time.sleep(0.1)
    return actor, line


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("function", "doing"),
    [*(("score", doing) for doing in EVERYTHING), *(("score_async", doing) for doing in ("busy", "pool", "stopped"))],
)
def test_nothing_of_a_reward_outlives_its_actor(mark: str, function: str, doing: str) -> None:
    actor, _ = begun(mark, function, doing)
    actor.kill()
    actor.wait()
    assert until(lambda: not alive(mark)), [(one.pid, one.status(), one.cmdline()) for one in alive(mark)]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("dead", "doing"),
    [
        *(("template", doing) for doing in ("busy", "pool", "stopped", "started")),
        *(("reaper", doing) for doing in ("busy", "stopped")),
    ],
)
def test_nothing_of_a_reward_outlives_its_template_or_its_reaper(mark: str, dead: str, doing: str) -> None:
    actor, line = begun(mark, "score", doing)
    before = {one.pid for one in alive(mark)} - {actor.pid}
    line[dead].kill()
    assert until(lambda: not before & {one.pid for one in alive(mark)})
    actor.kill()
    actor.wait()
    assert until(lambda: not alive(mark))


@pytest.mark.parametrize("doing", ["forked", "pool"])
def test_what_a_reward_has_started_does_not_outlive_its_process(mark: str, doing: str) -> None:
    actor, line = begun(mark, "score", doing)
    started = {one.pid for one in line["process"].children(recursive=True)}
    assert started
    line["process"].send_signal(signal.SIGKILL)
    assert until(lambda: not psutil.pid_exists(line["process"].pid) or line["process"].status() == "zombie")
    actor.terminate()
    actor.wait()
    assert until(lambda: not alive(mark))


REFUSED = """
import errno, os, sys, time
def refused(*_):
    raise OSError(errno.{name}, "refused")
os.pidfd_open = refused
from streamppo.tasks.rewards.processes import reaper
if os.fork() == 0:
    reaper.fork_template()
    print(os.getpid(), os.getppid(), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ENOSYS", "EPERM", "EMFILE"])
@pytest.mark.parametrize("first", ["actor", "template"])
def test_where_the_kernel_gives_no_descriptor_of_a_process_its_end_is_seen_too(
    mark: str, name: str, first: str
) -> None:
    command = [sys.executable, "-c", REFUSED.format(name=name)]
    environment = {**os.environ, MARK: mark, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as actor:
        assert actor.stdout
        template, reaper = (psutil.Process(int(one)) for one in actor.stdout.readline().split())
        time.sleep(1.0)
        assert {template, reaper} <= set(alive(mark)), "the reaper has taken nobody for dead"
        psutil.Process({"actor": actor.pid, "template": template.pid}[first]).kill()
        assert until(lambda: not {template, reaper}.intersection(alive(mark)))
        actor.kill()
