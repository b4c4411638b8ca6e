"""Starts Ray's workers as forks of a template: one process that has imported what a rank and an engine need.

To import torch, transformers and Ray takes 7 s of CPU in each of them. The template does it once, while Ray starts, so
that a run starts sooner; and a worker that replaces a dead one is there at once. Workers share the memory of what was
imported.

driver      starts the template, and gives Ray the launcher as the Python of its workers (`py_executable`)
launcher    takes the place of `python` in the command of a worker; sends its arguments, environment, folder and
            standard streams to the template, and ends when the fork ends
template    forks, and the fork runs the worker's script

A launcher whose template has died runs the script itself, as Ray would have done.

This file runs as a script in both roles, the launcher with Python's standard library alone. It needs Linux. A process
on a GPU is not forked: libraries of GPUs read the worker's environment when they are imported.
"""

import importlib
import json
import operator
import os
import resource
import runpy
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from hmac import compare_digest
from pathlib import Path
from secrets import token_hex
from typing import NamedTuple

FORKS, LAUNCHES = "forks", "launches"
"""The two roles: of the template, and of a launcher."""
LIBRARIES = (
    "torch",
    "transformers.masking_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
"""What the template imports at once, while Ray starts."""
ACTORS = (
    "ray",
    "streamppo.learner.learner",
    "streamppo.learner.model.tiny",
    "streamppo.queue.actor",
    "streamppo.rollout.embedded.engine",
    "streamppo.rollout.worker",
)
"""What it imports in the environment of the first worker: Ray reads its variables when it is imported."""
RANDOM = {"numpy": "random.seed", "torch": "default_generator.seed"}
"""Modules with a global random state, and the function that draws it anew."""
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""How soon the kernel kills this process for memory: Ray has workers killed before its own processes."""
READY = b"ready"
"""What the template says first, as soon as it can fork: a launcher that has given up by then sends nothing."""
STREAMS = 3
"""Standard input, output and error."""
NUMBER_BYTES = 8
WAIT_S = 30.0
"""How long a launcher waits for a template that still imports: Ray gives up a worker that has not come after 60 s."""
SEND_S = 10.0
"""Time limit of a launcher to say what to start; other launchers wait meanwhile."""
LOOK_S = 0.5
"""Time between two checks for a fork's end, if the kernel offers no pidfd."""


class WorkerStart(NamedTuple):
    """What makes a fork the process that Ray started; `limits` are those of `resource`, by number."""

    arguments: list[str]
    environment: Mapping[str, str]
    folder: str
    group: int
    limits: Mapping[str, tuple[int, int]]
    blocked_signals: list[int]
    niceness: int
    oom_score: str


def _own_start(arguments: list[str]) -> WorkerStart:
    """What this process is."""
    return WorkerStart(
        arguments,
        dict(os.environ),
        str(Path.cwd()),
        os.getpgrp(),
        {str(number): resource.getrlimit(number) for number in LIMITS},
        list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        os.getpriority(os.PRIO_PROCESS, 0),
        OOM_SCORE.read_text(),
    )


def _become(start: WorkerStart) -> None:
    """Be the process that Ray started: `python SCRIPT ARGUMENTS`."""
    os.environ.clear()
    os.environ.update(start.environment)
    os.chdir(start.folder)
    # Ray kills the process group of a worker that has died.
    os.setpgid(0, start.group)
    for number, limits in start.limits.items():
        resource.setrlimit(int(number), limits)
    signal.pthread_sigmask(signal.SIG_SETMASK, start.blocked_signals)
    os.setpriority(os.PRIO_PROCESS, 0, start.niceness)
    OOM_SCORE.write_text(start.oom_score)
    script, *_ = sys.argv = start.arguments
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path(script).parent))
    _draw_anew()
    runpy.run_path(script, run_name="__main__")


def _draw_anew() -> None:
    """Give this fork random numbers of its own; Python's `random` has them already."""
    for name, seed in RANDOM.items():
        if module := sys.modules.get(name):
            operator.attrgetter(seed)(module)()


@contextmanager
def running(
    libraries: Sequence[str] = LIBRARIES, actors: Sequence[str] = ACTORS, wait_s: float = WAIT_S
) -> Generator[str]:
    """Run a template with this process's environment during the block; yield Ray's `py_executable`.

    The template imports `libraries` at once, and `actors` in the environment of the first worker. It ends with the
    block or with this process; its forks live on.
    """
    # Of the abstract namespace: it leaves no file, whoever dies. Sandboxes may share this namespace, but see no secret.
    name, secret = f"streamppo-{token_hex(16)}", token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
        told = json.dumps([libraries, actors, sys.path, secret])
        template = subprocess.Popen(
            [sys.executable, __file__, FORKS, str(listener.fileno()), told],
            stdin=subprocess.PIPE,
            pass_fds=[listener.fileno()],
            # Ray sets it in a worker, but OpenMP reads it when torch is imported.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # Its own group gets no signals of the driver's, such as a terminal's. A fork can join its launcher's group,
            # because all are of one session.
            process_group=0,
        )
    with template:
        try:
            yield shlex.join([sys.executable, "-I", "-S", __file__, LAUNCHES, name, secret, str(wait_s)])
        finally:
            template.kill()


def _launch(name: str, secret: str, wait_s: float, arguments: list[str]) -> None:
    """Have the template fork a worker, and wait for its end; without a template become the worker."""
    if pid := _forked(name, secret, wait_s, arguments):
        _wait(pid)
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def _forked(name: str, secret: str, wait_s: float, arguments: list[str]) -> int:
    """The pid of the fork; 0 if there is no template any more, or not yet."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as channel:
        message = json.dumps([secret, _own_start(arguments)]).encode()
        channel.settimeout(wait_s)
        channel.connect(f"\0{name}")
        if not _is_ours(channel) or channel.recv(len(READY)) != READY:
            return 0
        channel.settimeout(None)
        socket.send_fds(channel, [len(message).to_bytes(NUMBER_BYTES)], range(STREAMS))
        channel.sendall(message)
        return int.from_bytes(channel.recv(NUMBER_BYTES))
    return 0


def _is_ours(channel: socket.socket) -> bool:
    """True if the process at the other end is this user's."""
    _, user, _ = struct.unpack("3i", channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    return user == os.getuid()


def _wait(pid: int) -> None:
    try:
        select.select([os.pidfd_open(pid)], [], [])
    except ProcessLookupError:
        return
    # Old kernels and seccomp filters have no pidfd.
    except OSError:
        while Path(f"/proc/{pid}").exists():
            time.sleep(LOOK_S)


def _prepare(names: list[str], path: list[str]) -> None:
    """Import modules by the driver's search path `path`; a fork has the search path of a worker that Ray started.

    If that fails, end without a word: workers that Python runs meet the same error, and it is reported as theirs.
    """
    own, sys.path = sys.path, path
    try:
        from streamppo.process import without_gc

        # No fork's garbage collection visits these objects, which would copy their memory.
        with without_gc():
            for name in names:
                importlib.import_module(name)
    finally:
        if sys.exception() is not None:
            os._exit(1)
    sys.path = own


def _serve(
    listener: socket.socket, libraries: list[str], actors: list[str], path: list[str], secret: str
) -> WorkerStart:
    """Fork for every launcher, until standard input ends. Returns in the forks alone."""
    _prepare(libraries, path)
    missing = actors
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if 0 in readable:
            os._exit(0)
        try:
            channel, _ = listener.accept()
        except OSError:
            continue
        start, streams = _receive(channel, secret)
        if start is not None and missing:
            os.environ.update(start.environment)
            _prepare(missing, path)
            missing = []
        forked = start is not None and _fork(channel)
        channel.close()
        for number, stream in enumerate(streams):
            if forked:
                os.dup2(stream, number)
            os.close(stream)
        if start is not None and forked:
            listener.close()
            return start


def _receive(channel: socket.socket, secret: str) -> tuple[WorkerStart | None, list[int]]:
    """Return what a launcher sent, None if nothing in time, and its standard streams."""
    streams: list[int] = []
    message = b""
    with suppress(OSError, ValueError, TypeError):
        channel.settimeout(SEND_S)
        if _is_ours(channel):
            channel.sendall(READY)
            size, streams, _, _ = socket.recv_fds(channel, NUMBER_BYTES, STREAMS)
            while part := channel.recv(int.from_bytes(size) - len(message)):
                message += part
            said, start = json.loads(message)
            if compare_digest(str(said), secret):
                return WorkerStart(*start), streams
    return None, streams


def _fork(channel: socket.socket) -> bool:
    """Return True in the fork, which has told its launcher its pid, and False here, also if no process can be made.

    A fork without a launcher ends, as a worker ends that is killed while it starts.
    """
    # The kernel removes an ended fork at once: this process waits for none.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        if os.fork():
            return False
    except OSError:
        return False
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        channel.sendall(os.getpid().to_bytes(NUMBER_BYTES))
    except OSError:
        os._exit(0)
    return True


if __name__ == "__main__":
    role, where, *rest = sys.argv[1:]
    if role == LAUNCHES:
        _launch(where, rest[0], float(rest[1]), rest[2:])
    else:
        if not sys.flags.safe_path:
            del sys.path[0]
        _become(_serve(socket.socket(fileno=int(where)), *json.loads(rest[0])))
