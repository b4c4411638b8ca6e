"""Run the program of an agent in a sandbox of Modal: `pip install modal`, and `modal token new`.

    [environment]
    command = ["python", "examples/walled_agent.py"]
    host = "203.0.113.7" # this machine as the service reaches it
    sandbox = { kind = "class", name = "examples/sandboxes/on_modal.py:Modal", arguments = { folder = "examples" } }

The sandbox is on another machine and asks the endpoint over the network, without encryption: docs/security.md says what
belongs around it. `folder` is there under its own path.
"""

import asyncio
import math
import os
from collections.abc import AsyncIterable

import modal
from modal.exception import SandboxTimeoutError

from streamppo.tasks.agent_sandbox import AgentProgram
from streamppo.tasks.scorers.capture import Ran

KEPT = 2**16
"""Of its output so many characters are kept, from the end."""
LATER_S = 10
"""A sandbox whose actor was killed ends by itself so much after its time limit."""


class Modal:
    """Sandboxes of the app `app` with the image `image`."""

    def __init__(self, folder: str, image: str = "python:3.12", app: str = "agents", memory_mib: int = 1024) -> None:
        self._image = modal.Image.from_registry(image).add_local_dir(folder, os.path.abspath(folder))
        self._app, self._memory_mib = app, memory_mib

    async def run(self, program: AgentProgram) -> Ran:
        """See `AgentSandbox.run`."""
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in program.words]
        sandbox = await modal.Sandbox.create.aio(
            *words,
            app=await modal.App.lookup.aio(self._app, create_if_missing=True),
            image=self._image,
            secrets=[modal.Secret.from_dict(dict(program.variables))],
            timeout=math.ceil(program.timeout_s) + LATER_S,
            memory=self._memory_mib,
        )
        try:
            async with asyncio.timeout(program.timeout_s):
                printed, errors = await asyncio.gather(_end_of(sandbox.stdout), _end_of(sandbox.stderr))
                await sandbox.wait.aio(raise_on_termination=False)
            return Ran(sandbox.returncode, printed, errors)
        except (TimeoutError, SandboxTimeoutError):
            return Ran(None, "", "")
        finally:
            await sandbox.terminate.aio()


async def _end_of(output: AsyncIterable[str]) -> str:
    text = ""
    async for piece in output:
        text = (text + piece)[-KEPT:]
    return text
