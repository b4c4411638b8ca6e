"""Programs are hostile: the bounds of each sandbox, and no unearned score.

Every attack here is on files, sockets and processes that the test has made itself.
"""

# An attack is read best as one line.
# ruff: noqa: E501

import asyncio
import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

import psutil
import pytest

from streamppo.commands.checks import task as checks
from streamppo.config.sections import Config
from streamppo.errors import TaskError
from streamppo.tasks.scorers import bubblewrap
from streamppo.tasks.scorers.bubblewrap import Bubblewrap
from streamppo.tasks.scorers.capture import Ran, RunLimits
from streamppo.tasks.scorers.code import CodeTests
from streamppo.tasks.scorers.launcher import FILE_BYTES, PROCESSES
from streamppo.tasks.scorers.sandbox import Local, Sandbox
from streamppo.types import Reward, ScoredText

walled = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "bubblewrap works")
LIMITS = RunLimits(timeout_s=30.0)
LIBC = "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"


class Host(NamedTuple):
    """Things beside the sandbox that a program wants."""

    folder: Path
    secret: str
    victim: int
    trainer: int
    port: int
    address: str
    abstract: str
    shared: str


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    secret = uuid.uuid4().hex
    monkeypatch.setenv("TRAINERS_KEY", secret)
    (tmp_path / "id_rsa").write_text(secret)
    (tmp_path / "journal.tip").write_text("42")
    victim = subprocess.Popen(["sleep", "600"], env={"VICTIMS_KEY": secret})
    shared = Path("/dev/shm", f"streamppo-test-{secret}")
    shared.write_text(secret)
    abstract = f"streamppo-test-{secret}"
    with socket.socket(socket.AF_UNIX) as named, socket.socket(socket.AF_UNIX) as nameless, socket.socket() as tcp:
        monkeypatch.chdir(tmp_path)
        named.bind("raylet.sock")
        nameless.bind(f"\0{abstract}")
        tcp.bind(("0.0.0.0", 0))
        for server in (named, nameless, tcp):
            server.listen()
        try:
            yield Host(
                tmp_path, secret, victim.pid, os.getpid(), tcp.getsockname()[1], own_address(), abstract, str(shared)
            )
        finally:
            shared.unlink()
            victim.kill()
            victim.wait()


def own_address() -> str:
    """An address of this machine that is not loopback, if it has one."""
    found = [one.address for name in psutil.net_if_addrs().values() for one in name if one.family == socket.AF_INET]
    return next((address for address in found if not address.startswith("127.")), "127.0.0.1")


def ran_in(sandbox: Sandbox, program: str, limits: RunLimits = LIMITS) -> Ran:
    return asyncio.run(sandbox.run(program, "", limits))


# --- things beside the sandbox -------------------------------------------------------------------------------

# Each prints the secret, or REACHED, when it has come where it must not.
REACHES = {
    "reads a private key": "print(open('{folder}/id_rsa').read())",
    "reads a private key by a link of its own": "import os\nos.symlink('{folder}/id_rsa', 'link')\nprint(open('link').read())",
    "reads a private key by /proc/self/root": "print(open('/proc/self/root{folder}/id_rsa').read())",
    "reads a private key by /proc/1/root": "print(open('/proc/1/root{folder}/id_rsa').read())",
    "reads a private key by its trainer's folder": "print(open('/proc/{trainer}/cwd/id_rsa').read())",
    "lists the run's folder": "import os\nprint('REACHED' if 'id_rsa' in os.listdir('{folder}') else '')",
    "reads the password file": "print('REACHED' if 'root:' in open('/etc/passwd').read() else '')",
    "reads the machine's name file": "print(open('/etc/hostname').read() and 'REACHED')",
    "overwrites the journal": "open('{folder}/journal.tip', 'w').write('0')\nprint('REACHED')",
    "deletes the journal": "import os\nos.remove('{folder}/journal.tip')\nprint('REACHED')",
    "puts a file beside the journal": "open('{folder}/new', 'w')\nprint('REACHED')",
    "kills a process of the user": "import os\nos.kill({victim}, 9)\nprint('REACHED')",
    "stops a process of the user": "import os, signal\nos.kill({victim}, signal.SIGSTOP)\nprint('REACHED')",
    "sends its trainer a signal": "import os\nos.kill({trainer}, 0)\nprint('REACHED')",
    "renices a process of the user": "import os\nos.setpriority(os.PRIO_PROCESS, {victim}, 19)\nprint('REACHED')",
    "pins a process of the user": "import os\nos.sched_setaffinity({victim}, os.sched_getaffinity({victim}))\nprint('REACHED')",
    "takes hold of a process of the user": "import os\nos.pidfd_open({victim})\nprint('REACHED')",
    "reads other processes' command lines": "print('REACHED' if 'sleep' in open('/proc/{victim}/cmdline').read() else '')",
    "reads the trainer's limits": "print(open('/proc/{trainer}/limits').read() and 'REACHED')",
    "reads another's environment": "print(open('/proc/{victim}/environ').read())",
    "traces a process of the user": LIBC + "print('REACHED' if libc.ptrace(0x4206, {victim}, 0, 0) == 0 else '')",
    "connects to the host's loopback": "import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)\nprint('REACHED')",
    "connects to the host's own address": "import socket\nsocket.create_connection(('{address}', {port}), 5)\nprint('REACHED')",
    "connects to a unix socket": "import os, socket\nos.chdir('{folder}')\nsocket.socket(socket.AF_UNIX).connect('raylet.sock')\n"
    "print('REACHED')",
    "connects to an abstract socket": "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0{abstract}')\nprint('REACHED')",
    "reads shared memory": "print(open('{shared}').read())",
}
# Of these a plain process of the same user may be kept by other things: its own namespaces, the kernel's settings.
DEPENDS = {"reads another's environment", "traces a process of the user", "connects to an abstract socket"}
DEPENDS |= {
    "connects to the host's loopback",
    "connects to the host's own address",
    "reads a private key by /proc/1/root",
}
DEPENDS |= {"reads the machine's name file", "reads a private key by its trainer's folder"}


def filled(program: str, host: Host) -> str:
    for name, value in host._asdict().items():
        program = program.replace(f"{{{name}}}", str(value))
    return program


@walled
@pytest.mark.parametrize("attack", REACHES)
def test_nothing_beside_the_sandbox_is_reached_by_a_program_that(attack: str, host: Host) -> None:
    ran = ran_in(Bubblewrap(), filled(REACHES[attack], host))
    assert host.secret not in ran.stdout and "REACHED" not in ran.stdout
    assert (host.folder / "journal.tip").read_text() == "42"
    assert sorted(path.name for path in host.folder.iterdir()) == ["id_rsa", "journal.tip", "raylet.sock"]
    assert psutil.Process(host.victim).status() == psutil.STATUS_SLEEPING


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize("attack", sorted(REACHES.keys() - DEPENDS))
def test_a_plain_process_is_no_wall_to_a_program_that(attack: str, host: Host) -> None:
    found = ran_in(Local(), filled(REACHES[attack], host)).stdout
    assert host.secret in found or "REACHED" in found, "the attack shows nothing: the test above is empty"


REACHES_NOTHING = {
    "looks for the trainer's environment": "import os, pathlib\n"
    "for one in pathlib.Path('/proc').glob('[0-9]*/environ'):\n    print(one.read_text())",
    "looks for its parent's descriptors": "import os\nfor one in os.listdir('/proc/1/fd'):\n"
    "    try:\n        print(open(f'/proc/1/fd/{one}').read(9999))\n    except OSError:\n        pass",
    "opens its descriptors' folders": "import os\nfor one in range(256):\n"
    "    for path in ('id_rsa', '../id_rsa', '{folder}/id_rsa'):\n        try:\n"
    "            print(os.read(os.open(path, 0, dir_fd=one), 99))\n        except OSError:\n            pass",
    "puts a link where its output was": "import os\nfor path in ('stdout', '../stdout', 'stderr', '../stderr', 'out'):\n"
    "    try:\n        os.path.lexists(path) and os.remove(path)\n        os.symlink('{folder}/id_rsa', path)\n"
    "    except OSError:\n        pass",
    "links its output to a secret": "import os\nos.close(1)\nos.symlink('/proc/{trainer}/environ', 'x')\nos.open('x', 0)",
    "makes a hard link": "import os\nos.link('{folder}/id_rsa', 'x')\nprint('REACHED')",
    "writes into the system": "open('/usr/lib/evil', 'w')\nprint('REACHED')",
    "writes into Python's packages": "import json, os\nopen(os.path.dirname(json.__file__) + '/evil.py', 'w')\nprint('REACHED')",
    "writes into the sandbox's root": "open('/evil', 'w')\nprint('REACHED')",
    "changes a setting of the kernel": "open('/proc/sys/kernel/core_pattern', 'w').write('x')\nprint('REACHED')",
    "mounts": LIBC + "print('REACHED' if libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0 else '')",
    "mounts the system for writing": LIBC
    + "print('REACHED' if libc.mount(b'', b'/usr', b'', 4128, None) == 0 else '')",
    "makes namespaces of its own": LIBC + "print('REACHED' if libc.unshare(0x10000000) == 0 else '')",
    "changes its root": "import os\nos.chroot('/tmp')\nprint('REACHED')",
    "makes a device": "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(8, 0))\nprint('REACHED')",
    "becomes root": "import os\nos.setuid(0)\nprint('REACHED')",
    "asks su": "import subprocess\nprint('REACHED' if subprocess.run(['su', '-c', 'true']).returncode == 0 else '')",
    "sets the clock": "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)\nprint('REACHED')",
    "renames the machine": "import socket\nsocket.sethostname('evil')\nprint('REACHED')",
    "writes to the terminal": "open('/dev/tty', 'w').write('x')\nprint('REACHED')",
    "asks for a name on the network": "import socket\nsocket.getaddrinfo('example.com', 80)\nprint('REACHED')",
    "sends a packet": "import socket\nsocket.socket(type=socket.SOCK_DGRAM).sendto(b'', ('{address}', 9))\nprint('REACHED')",
    "looks for interfaces": "import socket\nprint('REACHED' if len(socket.if_nameindex()) > 1 else '')",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))\nprint('REACHED')",
    "kills all that it can": "import os\nos.kill(-1, 9)",
    "kills its parent": "import os\nos.kill(os.getppid(), 9)\nprint(os.getppid())",
}


@pytest.mark.sampled(10)
@walled
@pytest.mark.parametrize("attack", REACHES_NOTHING)
def test_nothing_is_gained_by_a_program_that(attack: str, host: Host) -> None:
    ran = ran_in(Bubblewrap(), filled(REACHES_NOTHING[attack], host))
    assert host.secret not in ran.stdout + ran.stderr and "REACHED" not in ran.stdout
    assert "SyntaxError" not in ran.stderr and "NameError" not in ran.stderr, "the attack itself is broken"
    assert (host.folder / "journal.tip").read_text() == "42"
    assert psutil.Process(host.victim).status() == psutil.STATUS_SLEEPING


@walled
def test_python_may_stand_anywhere_also_outside_of_tmp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bubblewrap builds in /tmp, of which the mounts made for root had none but that of a Python below it."""
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    monkeypatch.setattr(sys, "executable", os.path.realpath(sys.executable))
    bubblewrap.problem.cache_clear()
    try:
        assert bubblewrap.problem() == ""
        assert ran_in(Bubblewrap(), "print(1)") == Ran(0, "1\n", "")
    finally:
        bubblewrap.problem.cache_clear()


# --- too much of everything ----------------------------------------------------------------------------------


@walled
def test_a_fork_bomb_has_a_bounded_number_of_processes() -> None:
    program = "import os, time\nn = 0\ntry:\n    while True:\n        if os.fork() == 0:\n            time.sleep(60)\n"
    ran = ran_in(Bubblewrap(), f"{program}        n += 1\nexcept OSError:\n    print(n)")
    assert 0 < int(ran.stdout) < PROCESSES


@walled
def test_the_memory_of_all_children_together_is_bounded() -> None:
    program = "import os, time\nfor _ in range(8):\n    if os.fork() == 0:\n        held = b'x' * (100 * 2**20)\n"
    ran = ran_in(Bubblewrap(), f"{program}        time.sleep(60)\ntime.sleep(60)", RunLimits(60.0, memory_mib=300))
    assert ran.exit_code == -9 and ran.stderr.endswith("all its processes together had more than 300 MiB")


@walled
@pytest.mark.parametrize("folder", ["/tmp", "/dev/shm"])
def test_a_program_cannot_fill_the_disk(folder: str) -> None:
    program = f"part = b'x' * 2**20\nfor n in range(99):\n    open(f'{folder}/{{n}}', 'wb').write(part)\n    print(n, flush=True)"
    ran = ran_in(Bubblewrap(disk_mib=8), program)
    assert "No space left" in ran.stderr and int(ran.stdout.split()[-1]) <= 8


@walled
def test_output_is_bounded() -> None:
    ran = ran_in(Bubblewrap(), "print('x' * 2 * 10**7)")
    assert "File too large" in ran.stderr and len(ran.stdout) == FILE_BYTES


@walled
@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM, errno.EMFILE])
def test_a_program_runs_where_the_kernel_gives_no_descriptor_of_it(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pidfd_open", refused)
    assert ran_in(Bubblewrap(), "print(1)").stdout == "1\n"
    assert ran_in(Bubblewrap(), "while True: pass", RunLimits(0.5)).exit_code is None


@walled
def test_a_program_runs_beside_more_open_files_than_select_can_number() -> None:
    """A reward worker with many connections has such descriptors, and all that come after them."""
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2048:
        pytest.skip("this process may not open so many files")
    with contextlib.ExitStack() as held:
        for _ in range(1100):
            held.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        assert ran_in(Bubblewrap(), "print(6 * 7)").stdout == "42\n"


@pytest.mark.sampled(1)
@walled
@pytest.mark.parametrize("end", ["", "while True: pass"], ids=["ends", "does not end"])
def test_no_daemon_outlives_its_program_that(end: str) -> None:
    daemon = uuid.uuid4().hex
    program = (
        "import os, signal, subprocess, sys\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n"
        "        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        f"        os.execvp(sys.executable, [sys.executable, '-c', 'import time; time.sleep(900)', '{daemon}'])\n"
        f"    os._exit(0)\nos.wait()\n{end}"
    )
    ran_in(Bubblewrap(), program, RunLimits(3.0 if end else 30.0))
    gone, left = psutil.wait_procs([one for one in psutil.process_iter() if daemon in _words(one)], timeout=20)
    assert not left, f"{left} outlived it, {gone} did not"


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@walled
def test_a_program_that_closes_its_descriptors_only_loses_its_output() -> None:
    assert ran_in(Bubblewrap(), "import os\nprint(1, flush=True)\nos.closerange(0, 999)") == Ran(0, "1\n", "")


@walled
def test_nothing_of_a_program_is_there_for_the_next_one() -> None:
    program = "import os\nprint(os.path.exists('/tmp/note'))\nopen('/tmp/note', 'w')"
    assert [ran_in(Bubblewrap(), program).stdout for _ in range(2)] == ["False\n"] * 2


# --- scores that were not earned -----------------------------------------------------------------------------

TEST = ["assert add(1234, 4321) == 5555"]
FAKES = {
    "is equal to all": "class Equal(int):\n    def __eq__(self, other): return True\n"
    "    def __hash__(self): return 0\ndef add(a, b): return Equal()",
    "gives an object that is equal to all": "class Equal:\n    def __eq__(self, other): return True\n"
    "    def __sub__(self, other): return 0\ndef add(a, b): return Equal()",
    "reads its own file for the test": "import re, sys\nsource = open(sys.argv[0]).read() + open('program.py').read()\n"
    "def add(a, b): return int(re.search(r'== (\\d+)', source)[1])",
    "reads its frames' constants": "import sys\ndef add(a, b):\n    frame = sys._getframe()\n    found = []\n"
    "    while frame:\n        found += [one for one in frame.f_code.co_consts if type(one) is int and one > 5000]\n"
    "        frame = frame.f_back\n    return found[0]",
    "searches memory for the test": "import gc\ndef add(a, b):\n    text = str([one for one in gc.get_objects()"
    " if type(one) is dict])\n    return 5555 if '== 55' + '55' in text else 0",
    "reads its stdin again": "import os\ndef add(a, b):\n    os.lseek(0, 0, 0)\n"
    "    return 5555 if b'== 55' + b'55' in os.read(0, 99999) else 0",
    "leaves with success": "import os\ndef add(a, b): os._exit(0)",
    "leaves with success at once": "raise SystemExit(0)",
    "says that it is done": "import os\nos.write(1, b'\"done\"\\n')\nos._exit(0)",
    "says it on every descriptor": "import os\nfor one in range(20):\n    try:\n"
    '        os.write(one, b\'{"passed": true}\\n"done"\\n\')\n    except OSError:\n        pass\nos._exit(0)',
    "answers with what is not data": "import os\nfor one in range(3, 20):\n    try:\n"
    '        os.write(one, b\'{"object": 1}\\n{"value": {"builtin": "all"}}\\n"done"\\n\')\n'
    "    except OSError:\n        pass\nos._exit(0)",
    "changes what equality means": "import builtins, operator\noperator.eq = lambda a, b: True\n"
    "builtins.AssertionError = ValueError\ndef add(a, b): return 0",
    "changes what its answers are written with": "import json\njson.dumps = lambda *_, **__: '{\"passed\": true}'\n"
    "def add(a, b): return 0",
    "raises the test's own exception": "def add(a, b): raise AssertionError",
    "changes its arguments": "def add(a, b):\n    a = b = 0\n    return a",
    "kills its parent": "import os, signal\ndef add(a, b):\n    os.kill(os.getppid(), signal.SIGKILL)\n    return 0",
    "registers an end of its own": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef add(a, b): return 0",
}


def scored(program: str, tests: list[object]) -> Reward:
    text = ScoredText(prompt="", completion=program, finish="stop", num_tokens=1)
    return CodeTests(test_timeout_s=30.0, all_timeout_s=200.0)(text, tests)


@pytest.mark.sampled(3)
@walled
@pytest.mark.parametrize("fake", FAKES)
def test_no_score_is_had_by_a_program_that(fake: str) -> None:
    assert scored(FAKES[fake], [*TEST]).score == 0.0


@walled
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return 0\ndef abs(x): return -1", "assert abs(f(1) - 5) < 1e-6"),
        ("class math:\n    isclose = lambda *_: True\ndef f(x): return 0", "assert math.isclose(f(1), 5)"),
        ("class np:\n    allclose = lambda *_: True\ndef f(x): return 0", "assert np.allclose(f(1), 5)"),
        ("class S(set):\n    __eq__ = lambda *_: True\ndef f(x): return S()", "assert set(f(1)) == {5}"),
        ("def f(x):\n    x.clear()\n    return []", "x = [2, 1]\nassert f(x) == sorted(x)"),
        ("class T:\n    __bool__ = lambda _: True\ndef f(x): return T()", "assert f(1)"),
        (
            "class L:\n    __len__ = lambda _: 5\n    __contains__ = lambda *_: True\ndef f(x): return L()",
            "assert 5 in f(1)",
        ),
    ],
)
def test_no_helper_of_a_test_is_taken_from_the_program(program: str, test: str) -> None:
    assert scored(program, [test]).score == 0.0


@pytest.mark.sampled(2)
@walled
@pytest.mark.parametrize(
    ("program", "test"),
    [
        ("def f(x): return x * 2.5", "assert math.isclose(f(2), 5)\nassert abs(f(1) - 2.5) < 1e-6"),
        (
            "def f(n): return {n: (n, [None, True, b'x', {1}, 1j])}",
            "assert f(1) == {1: (1, [None, True, b'x', {1}, 1j])}",
        ),
        ("def f(n): return n ** 4000", "assert f(10) == 10 ** 4000"),
        ("def f(x): return x", "assert f(f(1)) == 1 and f(float('inf')) > 1 and f(float('nan')) != f(0)"),
        (
            "def add(a, b): return a + b",
            "def check(candidate):\n    for i in range(4):\n        assert candidate(i, b=i) == 2 * i\ncheck(add)",
        ),
        (
            "class Solution:\n    def twice(self, xs): return [2 * x for x in xs]",
            "assert Solution().twice([1, 2]) == [2, 4]",
        ),
        ("class Stack(list):\n    push = list.append", "s = Stack()\nassert s == []"),
        (
            "class C:\n    def __init__(self): self.n = 0\n    def up(self): self.n += 1",
            "c = C()\nc.up()\nc.up()\nassert c.n == 2",
        ),
        ("def f(xs): xs.sort()", "xs = [2, 1]\nassert f(xs) is None\nassert xs == [1, 2]"),
        ("def f(n):\n    yield from range(n)", "assert list(f(3)) == [0, 1, 2]"),
        ("def f(n): raise KeyError(n)", "try:\n    f(1)\nexcept KeyError:\n    pass\nelse:\n    assert False"),
        ("def f(n): return len(n)", "x = f('abc')\nwhile x < 5:\n    x = f('a' * (x + 1))\nassert x == 5"),
        ("def sum(a, b): return a * b", "assert sum(10, 15) == 150"),
        ("from collections import Counter\ndef f(s): return Counter(s)", "assert f('aab') == {'a': 2, 'b': 1}"),
        ("N = 3", "assert N == 3"),
        ("def f(g, x): return g(x)", "assert f(len, 'abc') == 3"),
    ],
)
def test_a_right_program_passes_a_test_that_is_in_another_process(program: str, test: str) -> None:
    found = scored(program, [test])
    assert found.score == 1.0, found.explanation
    assert scored("pass", [test]).score == 0.0


@walled
@pytest.mark.parametrize("test", ["assert f(lambda x: x)", "assert f("])
def test_a_test_that_no_program_could_pass_is_an_error(test: str) -> None:
    with pytest.raises(TaskError, match="is unusable: "):
        scored("def f(x): return True", [test])


# --- where there is none -------------------------------------------------------------------------------------


def test_without_bubblewrap_the_default_is_refused_and_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    bubblewrap.problem.cache_clear()
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        with pytest.raises(TaskError, match=r"apt-get install bubblewrap.*dnf install bubblewrap.*sandbox:Local"):
            CodeTests()
    finally:
        bubblewrap.problem.cache_clear()


@walled
def test_check_says_which_sandbox_a_run_would_get(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(**arguments: object) -> list[tuple[str, str]]:
        where = "".join(f"sandbox='{name}'" for name in arguments.values())
        config = math_config(f"reward={{function='streamppo.tasks.scorers.code:CodeTests', arguments={{{where}}}}}")
        checked = checks.rewards(config, None)
        return [(one.state, one.text.split("; ")[-1]) for one in checked]

    assert found() == [("ok", "programs run in streamppo.tasks.scorers.bubblewrap:Bubblewrap")]
    local = "streamppo.tasks.scorers.sandbox:Local"
    assert found(sandbox=local) == [("ok", f"programs run in {local}, which does not isolate them")]
    monkeypatch.setattr(bubblewrap, "problem", lambda *_: "bubblewrap does not work here")
    assert found() == [("error", "bubblewrap does not work here")]


def test_local_is_taken_only_by_name_and_warns(caplog: pytest.LogCaptureFixture) -> None:
    CodeTests(sandbox="streamppo.tasks.scorers.sandbox:Local")
    assert "the sandbox Local does not isolate" in caplog.text


@walled
def test_a_sandbox_that_cannot_start_is_an_error_and_no_failed_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sandbox = Bubblewrap()
    monkeypatch.setattr(bubblewrap, "_system_mounts", lambda _: ["--ro-bind", "/nowhere", "/nowhere"])
    with pytest.raises(TaskError, match="the sandbox did not start"):
        ran_in(sandbox, "print(1)")
