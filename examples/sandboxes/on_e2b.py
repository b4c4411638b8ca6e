"""Run the program of an agent in a sandbox of E2B: `pip install e2b`, and a key in E2B_API_KEY.

    [environment]
    command = ["python", "examples/walled_agent.py"]
    host = "203.0.113.7" # this machine as the service reaches it
    sandbox = { kind = "class", name = "examples/sandboxes/on_e2b.py:E2B", arguments = { folder = "examples" } }

The sandbox is on another machine and asks the endpoint over the network, without encryption: docs/security.md says what
belongs around it. `folder` is copied under its own path.
"""

import math
import os
import shlex
from pathlib import Path

from e2b import AsyncSandbox, CommandExitException, TimeoutException

from streamppo.tasks.agent_sandbox import AgentProgram
from streamppo.tasks.scorers.capture import Ran

KEPT = 2**16
"""Of its output so many characters are kept, from the end."""
LATER_S = 10
"""A sandbox whose actor was killed ends by itself so much after its time limit."""


class E2B:
    """Sandboxes of a template."""

    def __init__(self, folder: str, template: str = "base") -> None:
        self._folder, self._template = Path(folder).absolute(), template

    async def run(self, program: AgentProgram) -> Ran:
        """See `AgentSandbox.run`."""
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in program.words]
        files = [{"path": str(one), "data": one.read_bytes()} for one in self._folder.rglob("*") if one.is_file()]
        sandbox = await AsyncSandbox.create(template=self._template, timeout=math.ceil(program.timeout_s) + LATER_S)
        printed, errors, code = _Tail(), _Tail(), None
        try:
            await sandbox.files.write_files(files, user="root")
            try:
                ended = await sandbox.commands.run(
                    shlex.join(words),
                    envs=dict(program.variables),
                    user="root",
                    on_stdout=printed.add,
                    on_stderr=errors.add,
                    timeout=program.timeout_s,
                    retain_output=False,
                )
                code = ended.exit_code
            except CommandExitException as failed:
                code = failed.exit_code
            except TimeoutException:
                code = None
        finally:
            await sandbox.kill()
        return Ran(code, printed.text, errors.text)


class _Tail:
    def __init__(self) -> None:
        self.text = ""

    def add(self, text: str) -> None:
        self.text = (self.text + text)[-KEPT:]
