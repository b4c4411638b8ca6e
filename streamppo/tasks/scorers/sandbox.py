"""Places in which programs of the policy run: a protocol, and this machine as one of them."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple, Protocol

LAUNCHER = Path(__file__).with_name("launcher.py")


class Ran(NamedTuple):
    """The end of a program. `exit_code` is None when it was killed at its time limit."""

    exit_code: int | None
    stdout: str
    stderr: str


class Sandbox(Protocol):
    """Runs Python programs that nobody trusts; a remote service is another class with this method."""

    def run(self, program: str, stdin: str, timeout_s: float) -> Ran:
        """Run to the end, or to the time limit. Raises an exception only if the sandbox itself fails."""
        ...


class Local:
    """A process of its own group, with limits on memory, CPU time, file size and processes, in an empty folder.

    Without network where the kernel lets us make a network namespace. It is no wall against an attacker: it sees the
    machine's files. On Linux the program ends when the process that runs it does, even by kill -9.
    """

    def __init__(self, memory_mib: int = 512, require_no_network: bool = False) -> None:
        self._memory_mib = memory_mib
        self._require_no_network = require_no_network

    def run(self, program: str, stdin: str, timeout_s: float) -> Ran:
        """See `Sandbox.run`."""
        with tempfile.TemporaryDirectory(prefix="streamppo-") as name:
            folder = Path(name)
            for part, content in (("stdin", stdin), ("stdout", ""), ("stderr", "")):
                (folder / part).write_text(content)
            (folder / "run").mkdir()
            (folder / "run" / "program.py").write_text(program)
            exit_code = self._run(folder, timeout_s)
            # The limit on the size of files is that on what is read here.
            out, err = ((folder / part).read_bytes().decode(errors="replace") for part in ("stdout", "stderr"))
            return Ran(exit_code, out, err)

    def _run(self, folder: Path, timeout_s: float) -> int | None:
        # Files, because the other end of a pipe may be held open by what the program has started.
        files = (folder / "stdin", "rb"), (folder / "stdout", "wb"), (folder / "stderr", "wb")
        with contextlib.ExitStack() as stack:
            stdin, out, err = (stack.enter_context(file.open(mode)) for file, mode in files)
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    str(LAUNCHER),
                    str(os.getpid()),
                    str(self._memory_mib),
                    str(int(timeout_s) + 1),
                    "require" if self._require_no_network else "try",
                ],
                cwd=folder / "run",
                env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8", "HOME": str(folder / "run")},
                stdin=stdin,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # Processes that the program has started are in its group, also when the program itself has ended.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
