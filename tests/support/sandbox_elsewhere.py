"""A sandbox class of a user's, as environment.sandbox names one."""

import asyncio
import os

from streamppo.tasks.agent_sandbox import AgentProgram
from streamppo.tasks.scorers.capture import Ran


class Elsewhere:
    """A sandbox of a user's: it runs the program here, as a service would run it elsewhere."""

    def __init__(self, answer: str = "ran") -> None:
        self.answer = answer

    async def run(self, program: AgentProgram) -> object:
        match self.answer:
            case "raises":
                raise OSError("the service is away")
            case "late":
                await asyncio.sleep(60)
            case "nothing":
                return None
        assert program.variables["OPENAI_BASE_URL"] == f"{program.address}/v1"
        process = await asyncio.create_subprocess_exec(
            *program.words, env={**os.environ, **program.variables}, stdout=asyncio.subprocess.PIPE
        )
        printed, _ = await process.communicate()
        return Ran(process.returncode, printed.decode(), "")
