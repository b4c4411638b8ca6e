"""The script's side of a run: starts its process, forwards its output, and waits for its end.

The process has its own process group: only the script receives a Ctrl-C, and sends one SIGINT to the process.
"""

import codecs
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from streamppo import errors
from streamppo.api.messages import RunReply, RunRequest, line
from streamppo.errors import Interrupted, RunError, StreamppoError

CHILD = "streamppo.api.child"
"""The module of the run's process."""
TICK_S = 2.0
"""Seconds between two calls of the watcher while the run has no output."""
DRAIN_S = 0.05
"""Seconds between two reads of the output of a run that stops."""
CHUNK = 2**16

Watcher = Callable[[Path], None]
"""Called with the run's folder repeatedly while it is running, and once after its end."""


def drive(request: RunRequest, watch: Watcher | None = None) -> Path:
    """Start or resume a run in a new process; return the run's folder when it has made all updates.

    Raises the run's `StreamppoError`, `RunError` if its process died, and `KeyboardInterrupt` after a Ctrl-C.
    """
    child = _Child(watch)
    try:
        child.send(request)
        child.follow()
    finally:
        child.end()
    return child.outcome()


def answer(*words: str) -> object:
    """Run a command of streamppo with `--json` among its `words`; return its output, whatever its exit code.

    Raises the error of streamppo that the command names.
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", "streamppo", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if not process.returncode or process.stdout.startswith("{"):
        return json.loads(process.stdout)
    error_name, _, text = process.stderr.rpartition("streamppo: ")[2].partition(": ")
    kind = getattr(errors, error_name, None)
    if isinstance(kind, type) and issubclass(kind, StreamppoError):
        raise kind(text.strip())
    raise RunError(process.stderr.strip() or f"`streamppo {words[0]}` has died ({process.returncode})")


class _Child:
    """The process of the run. Its output goes to `sys.stdout`, also if a notebook has replaced `sys.stdout`."""

    def __init__(self, watch: Watcher | None) -> None:
        self._watch = watch
        self._told = b""
        self._interrupted = self._drops = False
        self._channel, theirs = socket.socketpair()
        is_replaced = sys.stdout is not sys.__stdout__
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_replaced else None,
                stderr=subprocess.STDOUT if is_replaced else None,
                process_group=0,
                # The run can then import all modules that the script can.
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
            self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def send(self, request: RunRequest) -> None:
        """Send the request; `follow` detects a process that has died already."""
        with suppress(OSError):
            self._channel.sendall(line(request))

    def follow(self) -> None:
        """Forward output until the process ends, and SIGINT at every Ctrl-C; the second one ends the run at once."""
        is_open = True
        while is_open:
            try:
                is_open = self._step()
            except KeyboardInterrupt:
                self._interrupted = True
                self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Close the socket, which stops the process; wait for its end, and forward the rest of its output.

        Where forwarding fails, the rest is dropped, and the error is raised after the end.
        """
        self._channel.close()
        try:
            self._drain()
        finally:
            # Where forwarding failed, the process would wait without end for a reader of its output.
            self._drops = True
            self._drain()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._selector.close()
        if self._watch and (folder := self._folder()):
            self._watch(folder)

    def _drain(self) -> None:
        """Wait for the end of the process, and read its output meanwhile."""
        while self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DRAIN_S)
            if self._process.stdout is not None:
                self._pass_on()
        if self._process.stdout is not None:
            self._pass_on()

    def outcome(self) -> Path:
        """Return the folder of a run that has made all updates; raise its error otherwise. See `drive`."""
        code, folder = self._process.returncode, self._folder()
        if self._interrupted:
            raise KeyboardInterrupt
        for message in self._messages():
            if message.error:
                raise _error(message, code)
        if code or folder is None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RunError(f"{folder or 'the run'}: its process has died ({how}); its output says more")
        return folder

    def _step(self) -> bool:
        """Wait for output or a message, at most `TICK_S`; False once the process has closed its socket."""
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is not self._channel:
                self._pass_on()
            elif message := self._channel.recv(CHUNK):
                self._told += message
            else:
                return False
        if self._watch and (folder := self._folder()):
            self._watch(folder)
        return True

    def _pass_on(self) -> None:
        """Forward the available output."""
        stream = self._process.stdout
        assert stream is not None
        while data := stream.read(CHUNK):
            if not self._drops:
                sys.stdout.write(self._decoder.decode(data))
                sys.stdout.flush()
        if data == b"" and stream in self._selector.get_map():
            self._selector.unregister(stream)

    def _messages(self) -> list[RunReply]:
        return [msgspec.json.decode(text, type=RunReply) for text in self._told.splitlines()]

    def _folder(self) -> Path | None:
        return next((Path(told.folder) for told in self._messages() if told.folder), None)


def _error(told: RunReply, code: int) -> StreamppoError:
    if told.error == Interrupted.__name__:
        return Interrupted(code - 128)
    kind: type[StreamppoError] = getattr(errors, told.error)
    return kind(told.text)
