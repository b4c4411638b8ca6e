"""Starts Ray's workers as forks of a template: one process that has imported the libraries of ranks and engines.

The import of torch, transformers and Ray takes 7 s of CPU; the template imports them once, while Ray starts.

driver      starts the template, and gives Ray the launcher as the Python of its workers (`py_executable`)
launcher    replaces `python` in the command of a worker; sends its arguments, environment, folder and standard streams
            to the template, and ends when the fork ends
template    forks, and the fork runs the worker's script

If the template has died, the launcher runs the worker's script itself. This file runs as a script in both roles, on
Linux. The launcher imports only Python's standard library. A process on a GPU is not forked, because GPU libraries read
the worker's environment when they are imported.
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
LIBRARIES = (
    "torch",
    "transformers.masking_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.llama.modeling_llama",
)
ACTORS = (
    "ray",
    "streamppo.learner.learner",
    "streamppo.learner.model.tiny",
    "streamppo.queue.actor",
    "streamppo.rollout.embedded.engine",
    "streamppo.rollout.worker",
)
"""Modules imported in the environment of the first worker, because Ray reads its variables at import."""
RANDOM = {"numpy": "random.seed", "torch": "default_generator.seed"}
"""Modules with a global random state, and the function that reseeds it."""
LIMITS = [value for name, value in vars(resource).items() if name.startswith("RLIMIT_")]
OOM_SCORE = Path("/proc/self/oom_score_adj")
"""The kernel's out-of-memory score of this process. Ray makes the kernel kill workers before its own processes."""
READY = b"ready"
"""The template's first message, sent when it can fork. A launcher sends its message only after this message."""
STREAMS = 3
NUMBER_BYTES = 8
WAIT_S = 30.0
"""Time limit of a launcher for a template that is still importing. Ray gives a worker 60 s to start."""
SEND_S = 10.0
"""Time limit for a launcher's message. Other launchers wait meanwhile."""
LOOK_S = 0.5
"""Seconds between two checks for a fork's end, if the kernel has no pidfd."""


class WorkerStart(NamedTuple):
    """The properties of the process that Ray started, which the fork takes over. `limits` are its resource limits."""

    arguments: list[str]
    environment: Mapping[str, str]
    folder: str
    group: int
    limits: Mapping[str, tuple[int, int]]
    blocked_signals: list[int]
    niceness: int
    oom_score: str


def _describe_process(arguments: list[str]) -> WorkerStart:
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
    # Python's `random` reseeds itself in a fork.
    for name, seed in RANDOM.items():
        if module := sys.modules.get(name):
            operator.attrgetter(seed)(module)()
    runpy.run_path(script, run_name="__main__")


@contextmanager
def running(
    libraries: Sequence[str] = LIBRARIES, actors: Sequence[str] = ACTORS, wait_s: float = WAIT_S
) -> Generator[str]:
    """Run a template with this process's environment during the block. Yields Ray's `py_executable`.

    The template imports `libraries` at once, and `actors` in the environment of the first worker. Forks outlive it.
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
            # Ray sets this variable in a worker, but OpenMP reads it when torch is imported.
            env={"OMP_NUM_THREADS": "1", **os.environ},
            # A group of its own gets no signals of a terminal. In one session, a fork can join its launcher's group.
            process_group=0,
        )
    with template:
        try:
            yield shlex.join([sys.executable, "-I", "-S", __file__, LAUNCHES, name, secret, str(wait_s)])
        finally:
            template.kill()


def _launch(name: str, secret: str, wait_s: float, arguments: list[str]) -> None:
    """Make the template fork a worker, and wait until the worker ends. Without a template, become the worker."""
    if pid := _request_fork(name, secret, wait_s, arguments):
        _wait(pid)
    else:
        os.execv(sys.executable, [sys.executable, *arguments])


def _request_fork(name: str, secret: str, wait_s: float, arguments: list[str]) -> int:
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
    """Import modules with the driver's search path.

    An error ends this process. Launchers then run the workers without a fork, and these report the error.
    """
    worker_path, sys.path = sys.path, path
    try:
        from streamppo.process import without_gc

        # The garbage collection of a fork does not visit these objects, because a visit would copy their memory.
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
    """Fork for every launcher until standard input ends. Returns only in the forks."""
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
    """Fork, and send the fork's pid to the launcher. Returns True in the fork, which ends if the launcher has ended."""
    # If SIGCHLD is ignored, the kernel removes ended forks, and the template does not have to wait for them.
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
    role, address, *options = sys.argv[1:]
    if role == LAUNCHES:
        _launch(address, options[0], float(options[1]), options[2:])
    else:
        if not sys.flags.safe_path:
            del sys.path[0]
        _become(_serve(socket.socket(fileno=int(address)), *json.loads(options[0])))
