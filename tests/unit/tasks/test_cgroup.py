"""The cgroup of a program: its place, its processes, and its end.

Groups of this machine's version 2 have no limits in these tests: its controllers may be those of version 1.
"""

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from streamppo.tasks.scorers import bubblewrap, cgroup
from streamppo.tasks.scorers.bubblewrap import Bubblewrap
from streamppo.tasks.scorers.capture import Ran, RunLimits
from streamppo.tasks.scorers.sandbox import Local, Sandbox

MOUNT = "30 23 0:26 {root} {point} rw,nosuid - cgroup2 cgroup2 rw\n"
OTHERS = "24 23 0:22 / /proc rw - proc proc rw\n32 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
PROGRAM = RunLimits(30.0, memory_mib=300)


def tree(folder: Path, handed: dict[str, str]) -> None:
    """A tree of cgroups, and the controllers that each hands on."""
    for name, controllers in handed.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "cgroup.subtree_control").write_text(f"{controllers}\n")
        (folder / name / "cgroup.procs").touch()


@pytest.mark.parametrize(
    "own, root, wanted",
    [
        ("0::/user.slice/app.slice/run-1.scope", "/", ["user.slice/app.slice/run-1.scope", "user.slice/app.slice"]),
        ("0::/docker/4711/a", "/docker/4711", ["a", ""]),
        ("4:memory:/x\n0::/a", "/", ["a", ""]),
        ("0::/", "/", [""]),
        ("0::/docker/4711", "/docker/0815", []),
        ("0::/../beside", "/", []),
        ("4:memory:/x", "/", []),
    ],
)
def test_the_cgroups_around_a_process_are_found_by_its_mounts(own: str, root: str, wanted: list[str]) -> None:
    mounts = OTHERS + MOUNT.format(root=root, point="/sys/fs/cgroup/uni\\040fied")
    found = list(cgroup.levels(own, mounts))
    assert found[: len(wanted)] == [Path("/sys/fs/cgroup/uni fied", one) for one in wanted]
    assert all(one.is_relative_to("/sys/fs/cgroup/uni fied") for one in found) and bool(found) == bool(wanted)


def test_a_group_is_made_where_both_controllers_are_handed_on_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, {"": "cpu memory pids", "a": "memory pids", "a/b": "memory", "a/b/c": ""})
    asked: list[Path] = []
    monkeypatch.setattr(cgroup, "_is_usable", lambda level: asked.append(level) or level == tmp_path / "a")
    found = where(f"{tmp_path}", "/a/b/c", tmp_path, monkeypatch)
    assert found == tmp_path / "a" and asked == [found]
    (tmp_path / "a" / "cgroup.subtree_control").write_text("")
    assert where(f"{tmp_path}", "/a/b/c", tmp_path, monkeypatch) is None
    assert asked[1:] == [tmp_path], "it was tried, and did not work"


def where(point: str, own: str, aside: Path, monkeypatch: pytest.MonkeyPatch) -> Path | None:
    for name, text in (("PROCESS_GROUP", f"0::{own}\n"), ("MOUNTS", OTHERS + MOUNT.format(root="/", point=point))):
        (aside / name).write_text(text)
        monkeypatch.setattr(cgroup, name, aside / name)
    return cgroup.parent_group.__wrapped__()


@pytest.mark.parametrize("lacks", ["/proc/self/cgroup", "the mounts", "version 2"])
def test_without_a_cgroup_of_version_2_there_is_none(
    lacks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree(tmp_path, {"": "memory pids"})
    monkeypatch.setattr(cgroup, "PROCESS_GROUP", tmp_path / "own")
    monkeypatch.setattr(cgroup, "MOUNTS", tmp_path / "mounts")
    if lacks != "/proc/self/cgroup":
        (tmp_path / "own").write_text("4:memory:/x\n" if lacks == "version 2" else "0::/\n")
    if lacks != "the mounts":
        (tmp_path / "mounts").write_text(MOUNT.format(root="/", point=tmp_path))
    assert cgroup.parent_group.__wrapped__() is None


def test_the_groups_limits_lie_above_what_a_program_may_have(tmp_path: Path) -> None:
    """Its files in /tmp and /dev/shm, 64 MiB each, count there and not in a look."""
    made = {name: int(value) for name, value in cgroup.limits(300).items()}
    assert made["memory.max"] > made["memory.high"] >= (300 + 2 * 64 + 64) * 2**20
    assert made["pids.max"] > 64 and made["memory.oom.group"] == 1


def test_a_group_that_does_not_take_its_limits_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tree(tmp_path, {"": "memory pids"})
    monkeypatch.setattr(Path, "write_text", refused)
    assert cgroup._make(tmp_path, 300) is None
    assert sorted(one.name for one in tmp_path.iterdir()) == ["cgroup.procs", "cgroup.subtree_control"]


def refused(*_: object, **__: object) -> int:
    raise PermissionError


# --- groups of this machine ------------------------------------------------------------------------------------


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cgroup in which groups are made, without limits; skips where this process may make none."""
    monkeypatch.setattr(cgroup, "CONTROLLERS", frozenset[str]())
    monkeypatch.setattr(cgroup, "limits", lambda memory_mib: dict[str, str]())
    cgroup.parent_group.cache_clear()
    level = cgroup.parent_group()
    if level is None:
        cgroup.parent_group.cache_clear()
        pytest.skip("this process may make no cgroup of version 2")
    yield level
    cgroup.parent_group.cache_clear()


def kept(groups: Path) -> list[Path]:
    return list(groups.glob(f"{cgroup.NAME}-*"))


def ran_in(sandbox: Sandbox, program: str, limits: RunLimits = PROGRAM) -> Ran:
    return asyncio.run(sandbox.run(program, "", limits))


def test_a_program_and_its_children_run_in_a_group_that_goes_with_them(groups: Path) -> None:
    look = "print(open('/proc/self/cgroup').read(), flush=True)\n"
    ran = ran_in(Local(), f"import os\n{look}if os.fork() == 0:\n    {look}else:\n    os.wait()")
    assert ran.stdout.count(f"/{cgroup.NAME}-") == 2 and not ran.stderr
    assert not kept(groups)


@pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "bubblewrap works")
def test_all_processes_of_a_sandbox_are_in_its_group(groups: Path) -> None:
    seen: set[int] = set()

    def look() -> None:
        while not over.wait(0.01):
            for one in kept(groups):
                # A group that has been removed meanwhile has no processes.
                with suppress(OSError):
                    seen.update(map(int, (one / "cgroup.procs").read_text().split()))

    over = threading.Event()
    looking = threading.Thread(target=look)
    looking.start()
    ran = ran_in(Bubblewrap(), "import os, time\nos.fork()\ntime.sleep(0.5)\nprint(os.path.exists('/sys/fs/cgroup'))")
    over.set()
    looking.join()
    assert ran.stdout.split() == ["False", "False"], "a program sees no cgroups"
    assert len(seen) >= 4, "bubblewrap, the first process of the sandbox, and two of Python"
    assert not kept(groups)


@pytest.mark.parametrize("end", ["", "while True: pass"], ids=["ends", "does not end"])
def test_no_daemon_of_a_plain_process_outlives_it_in_a_group(groups: Path, end: str) -> None:
    daemon = uuid.uuid4().hex
    program = (
        "import os, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        f"        os.execvp(sys.executable, [sys.executable, '-c', 'import time; time.sleep(900)', '{daemon}'])\n"
        f"    os._exit(0)\nos.wait()\n{end}"
    )
    ran_in(Local(), program, RunLimits(2.0 if end else 30.0))
    assert not [one for one in psutil.process_iter() if daemon in " ".join(words(one))]
    assert not kept(groups)


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("fault", ["it cannot be entered", "it is gone", "it cannot be made"])
def test_a_program_runs_without_a_group_where(fault: str, groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults: dict[str, Callable[[], object]] = {
        "it cannot be entered": lambda: monkeypatch.setattr(cgroup, "ENTER", cgroup.ENTER.replace("0", "none", 1)),
        "it is gone": lambda: monkeypatch.setattr(cgroup, "_make", lambda *_: cgroup.ControlGroup(Path("/nowhere"))),
        "it cannot be made": lambda: monkeypatch.setattr(cgroup, "limits", lambda _: {"no.such": "1"}),
    }
    faults[fault]()
    assert ran_in(Local(), "print(1)") == Ran(0, "1\n", "")
    monkeypatch.undo()
    assert not kept(groups)


def test_groups_of_dead_processes_are_removed(groups: Path) -> None:
    left = groups / f"{cgroup.NAME}-{2**22 + 1}-0"
    left.mkdir()
    cgroup.parent_group.cache_clear()
    assert cgroup.parent_group() == groups and not left.exists()
