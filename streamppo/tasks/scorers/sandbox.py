"""Sandboxes for programs of the policy: the protocol, and a process without isolation. bubblewrap.py is the default."""

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from streamppo.tasks.scorers import capture
from streamppo.tasks.scorers.capture import Ran, RunLimits

__all__ = ["Local", "Ran", "RunLimits", "Sandbox"]

log = logging.getLogger(__name__)


class Sandbox(Protocol):
    """Runs untrusted Python programs; a client of a remote service may implement it."""

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        """Run a program to its end or to a limit. Raises only if the sandbox itself fails."""
        ...


@contextmanager
def scratch_folder() -> Generator[str]:
    """Make a temporary folder for a program, and remove it afterwards with all that the program left there."""
    folder = tempfile.mkdtemp(prefix="streamppo-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):
            # The folder has a thousand nested folders, or a child that has escaped still adds files.
            for command in (["chmod", "-R", "u+rwX"], ["rm", "-rf"]):
                subprocess.run([*command, "--", folder], stdin=subprocess.DEVNULL, capture_output=True, check=False)
            if os.path.lexists(folder):
                log.warning("%s: what a program left there could not be removed", folder)


class Local:
    """A process in its own group and an empty folder, with limits on memory, CPU time, file size and processes.

    The process is not isolated: the program sees the machine's files and runs as the trainer's user. A program
    has no network if the kernel allows a network namespace. On Linux a program ends with its parent process, even after
    kill -9.
    """

    def __init__(self, require_no_network: bool = False) -> None:
        log.warning(
            "the sandbox Local does not isolate: programs of the policy can read and change all that this user can"
        )
        self._around = "require" if require_no_network else "try"

    async def run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        return await asyncio.to_thread(self._run, program, stdin, limits)

    def _run(self, program: str, stdin: str, limits: RunLimits) -> Ran:
        with scratch_folder() as folder, capture.StartSignal() as started:
            (Path(folder) / "program.py").write_bytes(program.encode(errors="replace"))
            launcher = [str(capture.LAUNCHER), self._around, str(os.getpid()), *started.arguments(limits)]
            env = {"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "HOME": folder, "PYTHONHASHSEED": "0"}
            return capture.run([sys.executable, "-sP", *launcher], stdin, limits, started, env=env, folder=folder)
