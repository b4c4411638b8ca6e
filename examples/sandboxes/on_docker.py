"""Run the program of an agent in a Docker container: `pip install docker`, and a daemon on the actor's machine.

    [environment]
    command = ["python", "examples/walled_agent.py"]
    host = "172.17.0.1" # this machine as containers see it: `ip addr show docker0`
    sandbox = { kind = "class", name = "examples/sandboxes/on_docker.py:Docker", arguments = { folder = "examples" } }

The program sees `folder` under its own path, read-only, and reaches what `network` reaches: one that was made with
`docker network create --internal` reaches its gateway alone, which is the `host` then.
"""

import asyncio
import os

import docker
from docker.types import LogConfig
from requests.exceptions import ConnectionError, ReadTimeout

from streamppo.tasks.agent_sandbox import AgentProgram
from streamppo.tasks.scorers.capture import Ran

LINES = 1000
"""Of its output so many lines are read, from the end."""
LATER_S = 10.0
"""A container whose actor was killed ends by itself so much after its time limit."""


class Docker:
    """Containers of `image`, with `memory_mib` each."""

    def __init__(
        self, folder: str, image: str = "python:3.12", network: str = "bridge", memory_mib: int = 1024
    ) -> None:
        self._folder, self._image = os.path.abspath(folder), image
        self._network, self._memory_mib = network, memory_mib
        self._client = docker.from_env()

    async def run(self, program: AgentProgram) -> Ran:
        """See `AgentSandbox.run`."""
        container = await asyncio.to_thread(self._start, program)
        try:
            return await asyncio.to_thread(_ended, container, program.timeout_s)
        finally:
            await asyncio.to_thread(container.remove, force=True)

    def _start(self, program: AgentProgram) -> "docker.models.containers.Container":
        words = [os.path.abspath(word) if os.path.isfile(word) else word for word in program.words]
        return self._client.containers.run(
            self._image,
            ["timeout", "--signal=KILL", f"{program.timeout_s + LATER_S:g}", *words],
            detach=True,
            environment=dict(program.variables),
            volumes={self._folder: {"bind": self._folder, "mode": "ro"}},
            working_dir="/tmp",
            network=self._network,
            mem_limit=f"{self._memory_mib}m",
            pids_limit=256,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            log_config=LogConfig(type="local", config={"max-size": "1m", "max-file": "1"}),
        )


def _ended(container: "docker.models.containers.Container", timeout_s: float) -> Ran:
    try:
        code = container.wait(timeout=timeout_s)["StatusCode"]
    except (ReadTimeout, ConnectionError):
        code = None
    printed = container.logs(stdout=True, stderr=False, tail=LINES).decode(errors="replace")
    errors = container.logs(stdout=False, stderr=True, tail=LINES).decode(errors="replace")
    return Ran(code, printed, errors)
