"""Starts the process of a run from a script or notebook, forwards its output, and waits for its end.

The process has its own process group, so a Ctrl-C reaches only the script, which sends SIGINT to the process.
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
from streamppo.api.messages import RunReply, RunRequest, encode
from streamppo.errors import Interrupted, RunError, StreamppoError
from streamppo.tasks import plugins

CHILD = "streamppo.api.child"
TICK_S = 2.0
"""Seconds between two calls of the watcher while the run has no output."""
DRAIN_S = 0.05
"""Seconds between two reads of the output while the process stops."""
CHUNK_BYTES = 2**16

Watcher = Callable[[Path], None]
"""A function that is called with the run's folder repeatedly during the run, and once after its end."""


def drive(request: RunRequest, watch: Watcher | None = None) -> Path:
    """Start or resume a run in a new process. Returns the run's folder after all updates.

    Raises the run's `StreamppoError`, `RunError` if its process died, and `KeyboardInterrupt` after a Ctrl-C.
    """
    child = _Child(watch)
    try:
        child.send(request)
        child.follow()
    finally:
        child.end()
    return child.outcome()


def run_command(*words: str) -> object:
    """Run `streamppo WORDS --json` and return the parsed output. Raises the command's `StreamppoError`."""
    command = [sys.executable, "-m", "streamppo", *words]
    process = subprocess.run(command, capture_output=True, text=True, check=False, env=plugins.child_environment())
    if not process.returncode or process.stdout.startswith("{"):
        return json.loads(process.stdout)
    error_name, _, text = process.stderr.rpartition("streamppo: ")[2].partition(": ")
    kind = getattr(errors, error_name, None)
    if isinstance(kind, type) and issubclass(kind, StreamppoError):
        raise kind(text.strip())
    raise RunError(process.stderr.strip() or f"`streamppo {words[0]}` has died ({process.returncode})")


class _Child:
    """The process of the run. The run's output goes to `sys.stdout`, even if a notebook has replaced `sys.stdout`."""

    def __init__(self, watch: Watcher | None) -> None:
        self._watch = watch
        self._received = b""
        self._is_interrupted = self._drops_output = False
        self._channel, child_end = socket.socketpair()
        is_replaced = sys.stdout is not sys.__stdout__
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", CHILD, str(child_end.fileno())],
                pass_fds=[child_end.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if is_replaced else None,
                stderr=subprocess.STDOUT if is_replaced else None,
                process_group=0,
                env=plugins.child_environment(),
            )
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._channel, selectors.EVENT_READ)
        if self._process.stdout is not None:
            os.set_blocking(self._process.stdout.fileno(), False)
            self._selector.register(self._process.stdout, selectors.EVENT_READ)

    def send(self, request: RunRequest) -> None:
        # `outcome` reports a dead process.
        with suppress(OSError):
            self._channel.sendall(encode(request))

    def follow(self) -> None:
        """Forward output until the process ends. Each Ctrl-C sends a SIGINT; a second SIGINT ends the run at once."""
        is_open = True
        while is_open:
            try:
                is_open = self._step()
            except KeyboardInterrupt:
                self._is_interrupted = True
                self._process.send_signal(signal.SIGINT)

    def end(self) -> None:
        """Close the socket, which stops the process, and forward the output until its end, even after an error."""
        self._channel.close()
        try:
            self._drain()
        finally:
            # The output must be read, because the process waits while the pipe is full.
            self._drops_output = True
            self._drain()
            if self._process.stdout is not None:
                self._process.stdout.close()
        self._selector.close()
        if self._watch and (folder := self._folder()):
            self._watch(folder)

    def _drain(self) -> None:
        while self._process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DRAIN_S)
            self._forward()
        self._forward()

    def outcome(self) -> Path:
        """Return the run's folder if all updates are made. Otherwise raise the run's error, as `drive` describes."""
        code, folder = self._process.returncode, self._folder()
        if self._is_interrupted:
            raise KeyboardInterrupt
        for message in self._messages():
            if message.error == Interrupted.__name__:
                raise Interrupted(code - 128)
            if message.error:
                raise getattr(errors, message.error)(message.text)
        if code or folder is None:
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            raise RunError(f"{folder or 'the run'}: its process has died ({cause}); its output says more")
        return folder

    def _step(self) -> bool:
        """Wait at most `TICK_S` for output or a message. Returns False if the process has closed its socket."""
        for key, _ in self._selector.select(TICK_S):
            if key.fileobj is not self._channel:
                self._forward()
            elif message := self._channel.recv(CHUNK_BYTES):
                self._received += message
            else:
                return False
        if self._watch and (folder := self._folder()):
            self._watch(folder)
        return True

    def _forward(self) -> None:
        stream = self._process.stdout
        if stream is None:
            return
        while data := stream.read(CHUNK_BYTES):
            if not self._drops_output:
                sys.stdout.write(self._decoder.decode(data))
                sys.stdout.flush()
        if data == b"" and stream in self._selector.get_map():
            self._selector.unregister(stream)

    def _messages(self) -> list[RunReply]:
        # A long error arrives in parts, and a process that is killed may not send all of it.
        complete = self._received.split(b"\n")[:-1]
        return [msgspec.json.decode(text, type=RunReply) for text in complete]

    def _folder(self) -> Path | None:
        return next((Path(message.folder) for message in self._messages() if message.folder), None)
