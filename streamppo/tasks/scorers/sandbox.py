"""Places in which programs of the policy run: a protocol, and a plain process of this machine as the weakest of them.

bubblewrap.py has the default; docs/security.md says what each of them stops.
"""

import asyncio
import logging
import os
import sys
import tempfile
from pathlib import Path
from typing import Protocol

from streamppo.tasks.scorers import capture
from streamppo.tasks.scorers.capture import Ran, RunLimits

__all__ = ["Local", "Ran", "RunLimits", "Sandbox"]

log = logging.getLogger(__name__)


class Sandbox(Protocol):
    """Runs Python programs that nobody trusts; a remote service is another class with this method."""

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        """Run to the end, or to a limit. Raises an exception only if the sandbox itself fails."""
        ...


class Local:
    """A process of its own group, with limits on memory, CPU time, file size and processes, in an empty folder.

    It is no wall: it sees the machine's files, and acts as the trainer's user. It has no network where the kernel lets
    us make a network namespace. On Linux the program ends when the process that runs it does, even by kill -9.
    """

    def __init__(self, require_no_network: bool = False) -> None:
        log.warning("the sandbox Local is no wall: programs of the policy can read and change all that this user can")
        self._around = "require" if require_no_network else "try"

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        """See `Sandbox.run`."""
        return await asyncio.to_thread(self._run, program, stdin, limits)

    def _run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        with tempfile.TemporaryDirectory(prefix="streamppo-") as folder, capture.StartSignal() as started:
            (Path(folder) / "program.py").write_bytes(program.encode(errors="replace"))
            launcher = [str(capture.LAUNCHER), self._around, str(os.getpid()), *started.arguments(limits)]
            env = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "HOME": folder, "PYTHONHASHSEED": "0"}
            place = capture.Place(env=env, folder=folder)
            return capture.run([sys.executable, "-sP", *launcher], stdin, limits, started, place)
