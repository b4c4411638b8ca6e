"""Forwards the output of a reward's processes, with a bound, because user code may print any amount.

Each line gets the prefix `reward FUNCTION: `, so that it cannot imitate one of our log lines, whatever it contains.
"""

import logging
import os
import threading
import time
from io import FileIO

from streamppo.process import LINE_BYTES
from streamppo.terminal import harmless

WINDOW_S = 60.0
WINDOW_BYTES = 64 * 2**10
"""Bytes forwarded per window for all processes of a reward together; the rest is dropped."""

log = logging.getLogger(__name__)


def forward(source: int, function: str) -> None:
    """Forward `source` to the present standard output until every writer is gone, in a thread that closes it."""
    try:
        target = os.dup(1)
    except OSError:
        # Without a standard output the pipe must still be read, or its writers would block.
        target = os.open(os.devnull, os.O_WRONLY)
    threading.Thread(target=_forward, args=(source, target, function), name="reward-output", daemon=True).start()


def _forward(source: int, target: int, function: str) -> None:
    begin, passed, line = time.monotonic(), 0, b""
    head = f"reward {harmless(function)}: ".encode()
    with os.fdopen(source, "rb", buffering=0) as read, os.fdopen(target, "wb", buffering=0) as write:
        while chunk := read.read(2**16):
            if time.monotonic() - begin > WINDOW_S:
                begin, passed = time.monotonic(), 0
            forwarded = chunk[: max(0, WINDOW_BYTES - passed)]
            if passed <= WINDOW_BYTES < passed + len(chunk):
                log.warning("%s prints more than %d KiB a minute: the rest is dropped", function, WINDOW_BYTES // 2**10)
            passed += len(chunk)
            *whole, line = (line + forwarded).split(b"\n")
            while len(line) > LINE_BYTES:
                whole, line = [*whole, line[:LINE_BYTES]], line[LINE_BYTES:]
            _write(write, b"".join(_sanitise(whole_line, head) for whole_line in whole))
        if line:
            _write(write, _sanitise(line, head))


def _sanitise(line: bytes, head: bytes) -> bytes:
    """Add the prefix to a line and make it harmless."""
    return head + harmless(line.removesuffix(b"\r").decode(errors="replace")).encode() + b"\n"


def _write(target: FileIO, chunk: bytes) -> None:
    """Write all of `chunk`; stop if standard output is gone."""
    try:
        while chunk:
            chunk = chunk[target.write(chunk) :]
    except OSError:
        return
