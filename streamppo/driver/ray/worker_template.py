"""Starts Ray's workers as forks of a template: one process that has imported the libraries of ranks and engines.

The import of torch, transformers and Ray takes 7 s of CPU in each worker. The template imports them once, while Ray
starts: a run starts sooner, a dead worker is replaced at once, and workers share the memory of the libraries.

driver      starts the template, and gives Ray the launcher as the Python of its workers (`py_executable`)
launcher    replaces `python` in the command of a worker; sends its arguments, environment, folder and standard streams
            to the template, and ends when the fork ends
template    forks, and the fork runs the worker's script

A launcher whose template has died runs the script itself, as Ray would have done.

This file runs as a script in both roles; the launcher imports only Python's standard library. It needs Linux. A process
on a GPU is not forked: GPU libraries read the worker's environment when they are imported.
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
"""The template's first imports, while Ray starts."""
ACTORS = (
    "ray",
    "streamppo.learner.learner",
    "streamppo.learner.model.tiny",
    "streamppo.queue.actor",
    "streamppo.rollout.embedded.engine",
    "streamppo.rollout.worker",
)
"""The imports in the environment of the first worker: Ray reads its variables when it is imported."""
RANDOM = {"numpy": "random.seed", "torch": "default_generator.seed"}
"""Modules with a global random state, and the function that reseeds it."""
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""This process's rank among out-of-memory victims: Ray has workers killed before its own processes."""
READY = b"ready"
"""The template's first message, once it can fork: a launcher that has given up by then sends nothing."""
STREAMS = 3
"""Standard input, output and error."""
NUMBER_BYTES = 8
WAIT_S = 30.0
"""Time limit of a launcher for a template that still imports; Ray gives a worker 60 s to start."""
SEND_S = 10.0
"""Time limit for a launcher's message; other launchers wait meanwhile."""
LOOK_S = 0.5
"""Time between two checks for a fork's end, if the kernel offers no pidfd."""


class WorkerStart(NamedTuple):
    """The properties of the process that Ray started, for its fork; `limits` are those of `resource`, by number."""

    arguments: list[str]
    environment: Mapping[str, str]
    folder: str
    group: int
    limits: Mapping[str, tuple[int, int]]
    blocked_signals: list[int]
    niceness: int
    oom_score: str


def _describe_process(arguments: list[str]) -> WorkerStart:
    """The properties of this process."""
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
    """Take the properties of the process that Ray started, and run `python SCRIPT ARGUMENTS`."""
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
    _reseed()
    runpy.run_path(script, run_name="__main__")


def _reseed() -> None:
    """Reseed the libraries' random numbers in this fork; Python's `random` does so itself."""
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
    # A name in the abstract namespace leaves no file behind. Sandboxes may share the namespace, but not the secret.
    name, secret = f"streamppo-{token_hex(16)}", token_hex(16)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen(socket.SOMAXCONN)
        arguments = json.dumps([libraries, actors, sys.path, secret])
        template = subprocess.Popen(
            [sys.executable, __file__, FORKS, str(listener.fileno()), arguments],
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
    if pid := _request_fork(name, secret, wait_s, arguments):
        _wait(pid)
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def _request_fork(name: str, secret: str, wait_s: float, arguments: list[str]) -> int:
    """The pid of the fork; 0 if the template has ended or is not ready."""
    with suppress(OSError), socket.socket(socket.AF_UNIX) as channel:
        message = json.dumps([secret, _describe_process(arguments)]).encode()
        channel.settimeout(wait_s)
        channel.connect(f"\0{name}")
        if not _is_same_user(channel) or channel.recv(len(READY)) != READY:
            return 0
        channel.settimeout(None)
        socket.send_fds(channel, [len(message).to_bytes(NUMBER_BYTES)], range(STREAMS))
        channel.sendall(message)
        return int.from_bytes(channel.recv(NUMBER_BYTES))
    return 0


def _is_same_user(channel: socket.socket) -> bool:
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
    """Import modules with the driver's search path `path`; a fork then has the search path of a worker of Ray.

    After an error end silently: workers that Python starts raise the same error, and it is reported as theirs.
    """
    worker_path, sys.path = sys.path, path
    try:
        from streamppo.process import without_gc

        # No fork's garbage collection visits these objects, which would copy their memory.
        with without_gc():
            for name in names:
                importlib.import_module(name)
    finally:
        if sys.exception() is not None:
            os._exit(1)
    sys.path = worker_path


def _serve(
    listener: socket.socket, libraries: list[str], actors: list[str], path: list[str], secret: str
) -> WorkerStart:
    """Fork for every launcher, until standard input ends. Returns only in the forks."""
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
    """Return a launcher's message, None without one in time, and its standard streams."""
    streams: list[int] = []
    message = b""
    with suppress(OSError, ValueError, TypeError):
        channel.settimeout(SEND_S)
        if _is_same_user(channel):
            channel.sendall(READY)
            size, streams, _, _ = socket.recv_fds(channel, NUMBER_BYTES, STREAMS)
            while part := channel.recv(int.from_bytes(size) - len(message)):
                message += part
            received_secret, start = json.loads(message)
            if compare_digest(str(received_secret), secret):
                return WorkerStart(*start), streams
    return None, streams


def _fork(channel: socket.socket) -> bool:
    """Return True in the fork, after it has sent its pid to the launcher, and False here, also without a fork.

    A fork without a launcher ends, like a worker that is killed while it starts.
    """
    # The kernel removes an ended fork at once, without a wait here.
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
