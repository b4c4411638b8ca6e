"""More than sixty attacks that know docs/security.md and no code of ours: none has a score, a file, a process or memory.

A wrong program has 0.0 and never fails its trajectory, whatever its answer does to the checker.
"""

# An attack is read best as one line.
# ruff: noqa: E501

import asyncio
import sys
import time
from pathlib import Path

import pytest

from streamppo.errors import TaskError
from streamppo.tasks.scorers import bubblewrap
from streamppo.tasks.scorers.bubblewrap import Bubblewrap
from streamppo.tasks.scorers.capture import RunLimits
from streamppo.tasks.scorers.code import CodeTests
from streamppo.tasks.scorers.sandbox import Local
from streamppo.types import Reward, ScoredText

walled = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "bubblewrap works")
MEMORY_MIB = 200


def scored(program: str, test: object, test_timeout_s: float = 30.0) -> Reward:
    text = ScoredText(prompt="", completion=program, finish="stop", num_tokens=1)
    return CodeTests(test_timeout_s=test_timeout_s, all_timeout_s=60.0)(text, [test])


def raising(error: str, head: str = "") -> str:
    return f"{head}\ndef f(x): raise {error}"


CONTEXT = (
    "class C:\n    def __enter__(self): return 0\n    def __exit__(self, *error): return True\ndef f(x): return C()"
)
UNITTEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_f(self): self.assertEqual(f(1), 2)\n"
    "found = unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))\nassert found.wasSuccessful()"
)

# --- scores that were not earned: program, test ---------------------------------------------------------------

FAKES = {
    # exceptions that an iteration, an attribute or a library takes for its own
    "ends all() early": (raising("StopIteration"), "assert all(map(f, [1, 2, 3]))"),
    "ends a zip early": (raising("StopIteration"), "for x, y in zip(map(f, [1, 2]), [2, 3]): assert x == y"),
    "ends a sum early": (raising("StopIteration"), "assert sum(map(f, [1, 2])) == 0"),
    "ends a filter early": (raising("StopIteration"), "assert not list(filter(f, [1, 2]))"),
    "ends a loop by a class of StopIteration": (raising("E", "class E(StopIteration): pass"), "assert all(map(f, [1, 2]))"),
    "ends a generator of the test": (
        raising("GeneratorExit"),
        "def g():\n    yield 1\n    yield f(1)\nassert next(h := g()) == 1\ntry:\n    next(h)\nexcept GeneratorExit: pass",
    ),
    "ends an old iteration": (raising("IndexError"), "class T:\n    def __getitem__(self, i): assert f(i) == i\nassert list(T()) == []"),
    "lacks an attribute of the test": (raising("AttributeError"), "class T:\n    @property\n    def x(self): return f(1)\nassert getattr(T(), 'x', 2) == 2"),
    "has no attribute by hasattr": (raising("AttributeError"), "class T:\n    @property\n    def x(self): return f(1)\nassert not hasattr(T(), 'x')"),
    "lacks a key of the test": (
        raising("KeyError"),
        "import collections.abc as c\nclass T(c.Mapping):\n    def __getitem__(self, k): return f(k)\n    def __len__(self): return 1\n    def __iter__(self): return iter([1])\nassert T().get(1, 2) == 2",
    ),
    "skips its test": (raising("unittest.SkipTest('no')", "import unittest"), UNITTEST),
    "leaves its unittest": (raising("SystemExit(0)"), UNITTEST),
    "leaves a try of the test": (raising("SystemExit(0)"), "try:\n    assert f(1) == 2\nexcept SystemExit: pass"),
    "interrupts a try of the test": (raising("KeyboardInterrupt"), "try:\n    assert f(1) == 2\nexcept KeyboardInterrupt: pass"),
    "is cancelled": (raising("asyncio.CancelledError", "import asyncio"), "import asyncio\nasync def g():\n    assert f(1) == 2\nasync def h():\n    t = asyncio.create_task(g())\n    await asyncio.wait([t])\n    assert t.cancelled() or t.exception() is None\nasyncio.run(h())"),
    "stops an async loop": (raising("StopAsyncIteration"), "import asyncio\nclass A:\n    def __aiter__(self): return self\n    async def __anext__(self): return f(1)\nasync def g():\n    async for x in A(): assert x == 2\nasyncio.run(g())"),
    "names its exception ValueError": (raising("ValueError", "class ValueError(Exception): pass"), "try:\n    assert f(1) == 2\nexcept ValueError: pass"),
    "raises what is every exception": (raising("E", "class E(ValueError, KeyError, StopIteration.__base__): pass"), "try:\n    assert f(1) == 2\nexcept (OSError, ArithmeticError): pass"),
    "swallows the test's assertion": (CONTEXT, "with f(1) as x:\n    assert x == 5"),
    "is its own iterator with StopIteration at once": ("class I:\n    def __iter__(self): return self\n    def __next__(self): raise StopIteration\ndef f(x): return I()", "assert list(f(1)) == [1]"),
    # values that are not what they seem
    "answers with a float that is less than all": ("class F(float):\n    __lt__ = __eq__ = lambda *_: True\n    __sub__ = lambda s, o: s\n    __abs__ = lambda s: s\ndef f(x): return F(9)", "assert abs(f(1) - 5) < 1e-6"),
    "answers with a string that is equal to all": ("class S(str):\n    __eq__ = lambda *_: True\n    __hash__ = str.__hash__\ndef f(x): return S()", "assert f(1) == 'one'"),
    "answers with a list that is equal to all": ("class L(list):\n    __eq__ = lambda *_: True\ndef f(x): return L()", "assert f(1) == [1]"),
    "answers with a dict that has all keys": ("class D(dict):\n    __getitem__ = lambda *_: 5\n    __missing__ = lambda *_: 5\n    __eq__ = lambda *_: True\ndef f(x): return D()", "assert f(1)['a'] == 5"),
    "answers with a set that holds all": ("class S(set):\n    __contains__ = lambda *_: True\ndef f(x): return S()", "assert 5 in f(1)"),
    "answers with elements equal to all": ("class E:\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: 1\ndef f(x): return [E(), E()]", "assert f(1) == [1, 2]"),
    "answers with keys equal to all": ("class E(str):\n    __eq__ = lambda *_: True\n    __hash__ = lambda _: hash('a')\ndef f(x): return {E(): 1}", "assert f(1) == {'a': 1}"),
    "lies about its class": ("class E:\n    __class__ = int\n    __eq__ = lambda *_: True\ndef f(x): return E()", "assert isinstance(f(1), int) and f(1) == 2"),
    "answers NotImplemented": ("def f(x): return NotImplemented", "assert not (f(1) != 2)"),
    "answers Ellipsis": ("def f(x): return ...", "assert f(1) == 2"),
    "has a negative length": ("class L:\n    __len__ = lambda _: -5\ndef f(x): return L()", "assert not len(f(1)) >= 0"),
    "has a length beyond all": ("class L:\n    __len__ = lambda _: 10 ** 30\ndef f(x): return L()", "assert len(f(1)) == 3"),
    "is a tuple where a list is asked": ("def f(x): return (1, 2)", "assert f(1) == [1, 2]"),
    "is a bool by a string": ("def f(x): return 'False'", "assert f(1) is False"),
    # a forged conversation
    "prints the checker's words": ("print('{\"passed\": true}\\n\"done\"', flush=True)\ndef f(x): print('{\"passed\": true}\\n\"done\"', flush=True)", "assert f(1) == 2"),
    "answers with the checker's words": ("def f(x): return '{\"passed\": true}\\n\"done\"\\n'", "assert f(1) == 2"),
    "raises the checker's words": (raising("ValueError('\"}\\n{\"passed\": true}\\n\"done\"')"), "assert f(1) == 2"),
    "names a class by the checker's words": (raising("type('\"}\\n{\"passed\": true}\\n\"done\"', (Exception,), {})()"), "assert f(1) == 2"),
    "writes from a child afterwards": ("import os, time\nif os.fork() == 0:\n    time.sleep(0.2)\n    os.write(1, b'{\"passed\": true}\\n\"done\"\\n')\n    os._exit(0)\ndef f(x): return 1", "assert f(1) == 2"),
    "looks for the answer in its frames": ("import gc\ndef f(x):\n    for one in gc.get_objects():\n        if type(one) is dict and 'wanted' in one: return one['wanted']\n    return 1", "assert f(1) == 2"),
    "changes the sandbox's json": ("import json, json.encoder\njson.dumps = json.encoder.encode_basestring = lambda *_, **__: '{\"passed\": true}'\nimport sys\nsys.modules['json'] = None\ndef f(x): return 1", "assert f(1) == 2"),
    # printed answers
    "prints all answers": ("for n in range(100): print(n)", {"input": "1", "output": "2"}),
    "prints its input file": ("import glob\nfor one in glob.glob('/proc/self/fd/*') + glob.glob('./*'):\n    try:\n        print(open(one).read(99))\n    except OSError: pass", {"input": "1", "output": "57"}),
    "separates lines by U+2028": (r"print('1\u20282')", {"input": "", "output": "1\n2"}),
    "separates lines by a form feed": (r"print('1\x0c2')", {"input": "", "output": "1\n2"}),
    "separates lines by a file separator": (r"print('1\x1c2')", {"input": "", "output": "1\n2"}),
    "prints bytes that are not text": (r"import os" + "\n" + r"os.write(1, b'\xff\xfe')", {"input": "", "output": "1"}),
    # whole programs that are none
    "is empty": ("", "assert f(1) == 2"),
    "is a null byte": ("\0", "assert f(1) == 2"),
    "has half a character": ("x = '\ud800'\ndef f(x): return 1", "assert f(1) == 2"),
    "nests too deep to be read": ("def f(x): return " + "(" * 5000 + ")" * 5000, "assert f(1) == 2"),
    "claims an encoding": ("# -*- coding: rot13 -*-\nqrs s(k): erghea 2", "assert f(1) == 2"),
    "leaves the interpreter when it is imported": ("import os\nos._exit(0)", "assert f(1) == 2"),
}  # fmt: skip

# Answers that cost the checker time, memory or its protocol: program's answer, the test.
CRASHES = {
    "a range without end, as a list": ("range(10 ** 12)", "assert list(f(1)) == [1]"),
    "a range without end, summed": ("range(10 ** 12)", "assert sum(f(1)) == 1"),
    "a range without end, compared": ("range(10 ** 12)", "assert sorted(f(1)) == [1]"),
    "a count of repetitions": ("10 ** 11", "assert [0] * f(1) == [0]"),
    "a count of characters": ("10 ** 10", "assert 'a' * f(1) == 'a'"),
    "an exponent": ("10 ** 9", "assert 3 ** f(1) == 9"),
    "an argument of factorial": ("10 ** 8", "assert math.factorial(f(1)) == 2"),
    "a slow pattern": ("'(a+)+$'", "assert re.match(f(1), 'a' * 60 + 'b')"),
    "a width of a format": ("10 ** 10", "assert f'{1:>{f(1)}}' == '1'"),
    "an iterator without end": ("itertools.count()", "assert list(f(1)) == [0]"),
    "a nest of a hundred thousand lists": ("nest()", "assert f(1) == [1]"),
    "a list that holds itself": ("ring()", "assert f(1) == [1]"),
    "half a character": ("chr(0xd800)", "assert f(1) == 'a'"),
    "nine million characters": ("'y' * 9_000_000", "assert f(1) == 'y'"),
    "thirty million characters": ("'y' * 30_000_000", "assert f(1) == 'y'"),
    "a list of a million numbers": ("list(range(1_000_000))", "assert f(1) == [1]"),
    "an integer of a million digits": ("1 << 3_000_000", "assert f(1) == 1"),
    "a negative integer of many digits": ("-(10 ** 5000)", "assert f(1) == 1"),
    "separators of lines": (r"'a\x0b\x1c\x85\u2028\u2029\r\nb'", "assert f(1) == 'a'"),
    "an object whose repr raises": ("Broken()", "assert f(1) == 'a', f(1)"),
    "an object whose hash raises": ("Broken()", "assert f(1) in {1, 2}"),
    "an object whose index raises": ("Broken()", "assert [1, 2][f(1)] == 1"),
    "no number": ("float('nan')", "assert f(1) == 1"),
    "a module": ("itertools", "assert f(1) == 1"),
    "itself": ("f", "assert f(1) == 1"),
}
ANSWERS = (
    "import itertools\nclass Broken:\n    def __getattribute__(self, name): raise ZeroDivisionError\n"
    "    def __repr__(self): raise ZeroDivisionError\n    __hash__ = __index__ = __str__ = __repr__\n"
    "def nest():\n    x = []\n    for _ in range(100_000): x = [x]\n    return x\n"
    "def ring():\n    x = []\n    x.append(x)\n    return x\ndef f(x): return "
)  # fmt: skip

# --- the machine -----------------------------------------------------------------------------------------------

LIBC = "import ctypes, mmap, os, socket, sys, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
CHUNK = "64 * 2 ** 20"
# Each takes 1,600 MiB in 25 parts and then says so; 200 are allowed.
HOARDS = {
    "SysV segments": "libc.shmat.restype = ctypes.c_void_p\nfor _ in range(25):\n    one = libc.shmget(0, 64 * 2 ** 20, 0o1600)\n    if one < 0: sys.exit('refused')\n    ctypes.memset(libc.shmat(one, None, 0), 1, 64 * 2 ** 20)\n",
    "SysV segments that are left": "libc.shmat.restype = ctypes.c_void_p\nlibc.shmdt.argtypes = [ctypes.c_void_p]\nfor _ in range(25):\n    one = libc.shmget(0, 64 * 2 ** 20, 0o1600)\n    if one < 0: sys.exit('refused')\n    at = libc.shmat(one, None, 0)\n    ctypes.memset(at, 1, 64 * 2 ** 20)\n    libc.shmdt(at)\n",
    "shared maps over forks": "for _ in range(25):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 64 * 2 ** 20)\n        m.write(b'x' * len(m))\n        time.sleep(60)\n    time.sleep(0.02)\n",
    "forks whose name is no text": "open('/proc/self/comm', 'wb').write(bytes([255]))\nfor _ in range(25):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 64 * 2 ** 20)\n        m.write(b'x' * len(m))\n        time.sleep(60)\n    time.sleep(0.02)\n",
    "forks whose name looks like an amount": "open('/proc/self/comm', 'wb').write(b'x kB')\nfor _ in range(25):\n    if os.fork() == 0:\n        m = mmap.mmap(-1, 64 * 2 ** 20)\n        m.write(b'x' * len(m))\n        time.sleep(60)\n    time.sleep(0.02)\n",
    "shared maps of one process": "held = []\nfor _ in range(25):\n    held.append(mmap.mmap(-1, 64 * 2 ** 20))\n    held[-1].write(b'x' * 2 ** 26)\n",
    "files in memory": "for _ in range(25):\n    fd = os.memfd_create('x')\n    for _ in range(64): os.write(fd, b'x' * 2 ** 20)\n",
    "files in memory that are mapped no more": "for _ in range(25):\n    fd = os.memfd_create('x')\n    os.ftruncate(fd, 2 ** 26)\n    m = mmap.mmap(fd, 2 ** 26)\n    m.write(b'x' * len(m))\n    m.close()\n",
    "files of /dev/shm without names": "for n in range(25):\n    fd = os.open(f'/dev/shm/{n}', os.O_CREAT | os.O_RDWR)\n    os.unlink(f'/dev/shm/{n}')\n    for _ in range(64): os.write(fd, b'x' * 2 ** 20)\n",
    "socket pairs full of data": "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\nheld = []\nsent = 0\nwhile sent < 1600 * 2 ** 20:\n    a, b = socket.socketpair()\n    a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 ** 27)\n    a.setblocking(False)\n    held.append((a, b))\n    try:\n        while True: sent += a.send(b'x' * 2 ** 16)\n    except BlockingIOError: pass\n",
    "pipes full of data": "import fcntl, resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)\nheld = []\nsent = 0\nwhile sent < 1600 * 2 ** 20:\n    r, w = os.pipe()\n    try: fcntl.fcntl(w, 1031, 2 ** 20)\n    except OSError: pass\n    os.set_blocking(w, False)\n    try:\n        while True: sent += os.write(w, b'x' * 2 ** 16)\n    except BlockingIOError: pass\n",
    "threads' stacks": "import threading\nthreading.stack_size(64 * 2 ** 20)\nfor _ in range(25): threading.Thread(target=lambda: (ctypes.memset(ctypes.create_string_buffer(2 ** 26), 1, 2 ** 26), time.sleep(60)), daemon=True).start()\ntime.sleep(3)\n",
}  # fmt: skip

# Each says REACHED when it has come where it must not; all run in one sandbox, in children of their own.
REACHES = {
    "a terminal's input": "import fcntl, termios\nfor fd in range(3): fcntl.ioctl(fd, termios.TIOCSTI, b'x')",
    "packets of the wire": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "raw packets": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "the hypervisor's sockets": "s = socket.socket(socket.AF_VSOCK)\ns.settimeout(2)\ns.connect((2, 22))",
    "the host's interfaces": "assert len(os.listdir('/sys/class/net')) > 1",
    "the cgroups": "open('/sys/fs/cgroup/cgroup.procs', 'w').write('1')",
    "a new cgroup": "os.mkdir('/sys/fs/cgroup/evil')",
    "memory of the first process": "open('/proc/1/mem', 'rb').read(1)",
    "the kernel's memory": "os.pread(os.open('/proc/kcore', 0), 8, 4096)",
    "the kernel's log": "assert libc.syscall(103, 3, ctypes.create_string_buffer(99), 99) > 0",
    "keys of the user": "open('/proc/keys').read()\nassert libc.syscall(250, 11, -4, ctypes.create_string_buffer(99), 99) > 0",
    "another user namespace": "os.setns(os.open('/proc/1/ns/user', 0), 0)",
    "a module of the kernel": "assert libc.syscall(313, os.memfd_create('x'), b'', 0) == 0",
    "a program of the kernel": "assert libc.syscall(321, 5, ctypes.create_string_buffer(128), 128) >= 0",
    "swap": "assert libc.swapoff(b'/dev/sda') == 0 or ctypes.get_errno() == 22",
    "a restart": "assert libc.syscall(169, 0xfee1dead, 672274793, 0x89abcdef, None) == 0",
    "an inherited descriptor": "assert any(os.path.exists(f'/proc/self/fd/{n}') and os.readlink(f'/proc/self/fd/{n}').startswith(('/work', '/root', '/home', 'socket')) for n in range(3, 256))",
    "secrets of the environment": "assert any('KEY' in name or 'TOKEN' in name for name in os.environ)",
    "the password's shadow": "open('/etc/shadow').read()",
    "a disk": "import glob\nopen(glob.glob('/dev/[svn][dv][a-z]*')[0], 'rb').read(1)",
    "memory by /dev/mem": "open('/dev/mem', 'rb').read(1)",
    "the sandbox's own program": "open(sys.argv[0], 'a')\nassert sys.argv[0].startswith('/usr')",
    "a higher priority": "os.nice(-5)",
    "a real-time schedule": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "a core of a crash": "assert open('/proc/sys/kernel/core_pattern', 'a')",
    "a mount by the new calls": "assert libc.syscall(428, -100, b'/', 1) >= 0 and libc.syscall(429, 3, b'', -100, b'/tmp', 4) == 0",
}  # fmt: skip


@pytest.mark.sampled(3)
@walled
@pytest.mark.parametrize("attack", FAKES)
def test_no_score_is_earned_by_a_program_that(attack: str) -> None:
    assert scored(*FAKES[attack]).score == 0.0


@pytest.mark.sampled(3)
@walled
@pytest.mark.parametrize("answer", CRASHES)
def test_the_checker_gives_0_in_time_to(answer: str) -> None:
    value, test = CRASHES[answer]
    began = time.monotonic()
    assert scored(ANSWERS + value, f"import math, re\n{test}", test_timeout_s=2.0).score == 0.0
    assert time.monotonic() - began < 8


@walled
@pytest.mark.parametrize("hoard", HOARDS)
def test_no_memory_beyond_the_limit_is_taken_by(hoard: str) -> None:
    ran = asyncio.run(Bubblewrap().run(f"{LIBC}{HOARDS[hoard]}print('REACHED')", "", RunLimits(20.0, MEMORY_MIB)))
    assert "REACHED" not in ran.stdout and "SyntaxError" not in ran.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
@pytest.mark.parametrize("hoard", [one for one in HOARDS if "/dev/shm" not in one])
def test_a_plain_process_takes_no_memory_beyond_the_limit_by(hoard: str) -> None:
    segments = Path("/proc/sysvipc/shm").read_text()
    ran = asyncio.run(Local().run(f"{LIBC}{HOARDS[hoard]}print('REACHED')", "", RunLimits(20.0, MEMORY_MIB)))
    assert "REACHED" not in ran.stdout and "SyntaxError" not in ran.stderr
    assert Path("/proc/sysvipc/shm").read_text() == segments


@pytest.fixture(scope="module")
def reached() -> str:
    """All that the attacks of REACHES print, each in a child of one sandbox."""
    program = (
        f"{LIBC}for name, attack in {REACHES!r}.items():\n    if os.fork() == 0:\n        try:\n"
        "            exec(attack)\n            print(f'REACHED {name};', flush=True)\n"
        "        except BaseException as error:\n            print(f'{type(error).__name__} {name};', flush=True)\n"
        "        finally:\n            os._exit(0)\n    os.wait()\nprint('end')"
    )
    return asyncio.run(Bubblewrap().run(program, "", RunLimits(60.0))).stdout


@walled
@pytest.mark.parametrize("place", REACHES)
def test_no_program_reaches(place: str, reached: str) -> None:
    assert "end" in reached and f"REACHED {place};" not in reached
    assert f"SyntaxError {place};" not in reached and f"NameError {place};" not in reached


RIGHT = {
    "a fraction": ("from fractions import Fraction\ndef f(n): return Fraction(1, n)", "from fractions import Fraction\nassert f(3) == Fraction(1, 3)"),
    "an array": ("from array import array\ndef f(n): return array('i', range(n))", "from array import array\nassert f(3) == array('i', [0, 1, 2])"),
    "a named tuple": ("from collections import namedtuple\ndef f(n): return namedtuple('P', 'x y')(n, 2)", "assert f(1).x == 1 and f(1) == (1, 2)"),
    "drawn numbers": ("def f(n): return n + 1", "import random\nn = random.randrange(10 ** 9)\nassert f(f(n)) == n + 2"),
    "drawn ids": ("def f(s): return s[::-1]", "import uuid\ns = str(uuid.uuid4())\nassert f(f(s)) == s"),
    "an order of a set": ("def f(s): return s + 'x'", "for s in {'a', 'b', 'c', 'd'}: assert f(f(s)) == s + 'xx'"),
    "an error that cannot be decoded": ("def f(b): return b.decode()", "try:\n    f(b'\\xff')\nexcept UnicodeDecodeError: pass\nelse: assert False"),
    "a large answer": ("def f(n): return 'y' * n", "assert f(9_000_000) == 'y' * 9_000_000"),
    "separators of lines": (r"print('1\u20282')", {"input": "", "output": "1\u20282"}),
}  # fmt: skip


@pytest.mark.sampled(2)
@walled
@pytest.mark.parametrize("answer", RIGHT)
def test_a_right_program_scores_1_with(answer: str) -> None:
    found = scored(*RIGHT[answer])
    assert found.score == 1.0, found.explanation


@walled
@pytest.mark.parametrize(
    "program, test",
    [
        ("def f(x): return 'y' * 9_000_000", "assert f(f(f(1) + f(1))) == 'y'"),
        ("def f(x): raise SyntaxError('x')", "assert f(1) == 1"),
        ("def f(x): return '\\ud800'", "assert f(1) == 'a', f(1)"),
    ],
)
def test_a_wrong_program_scores_0_and_fails_no_trajectory(program: str, test: str) -> None:
    found = scored(program, test)
    assert found.score == 0.0 and found.explanation.encode()


@walled
def test_a_test_that_hands_over_the_time_is_an_error() -> None:
    with pytest.raises(TaskError, match="change in every run"):
        scored("def f(x): return x", "import time\nassert f(f(time.time())) > 0")


@walled
def test_a_rest_of_time_is_no_failure_of_the_sandbox() -> None:
    text = ScoredText(prompt="", completion="while True: pass", finish="stop", num_tokens=1)
    assert CodeTests(test_timeout_s=0.3, all_timeout_s=0.31)(text, ["assert f(1)"] * 3).score == 0.0
