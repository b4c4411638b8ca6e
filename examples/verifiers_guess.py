"""Guess a number: an environment as verifiers has them, played by `streamppo.tasks.library.verifiers:run`.

guess 3: more or less?     the task, whose answer is 3 or 8
3                          the policy's first turn
more                       what the environment says to a wrong one
8                          the second, and last
"""

from collections.abc import Iterator

import verifiers.v1 as vf
from openai import AsyncOpenAI

__all__ = ["Asks", "Guess", "Numbers"]
TRIES = 2


class Number(vf.TaskData):
    """A task and its answer."""

    answer: str


class Find(vf.Task[Number, vf.State, vf.TaskConfig]):
    """Its reward comes from the environment."""


class Numbers(vf.Taskset[Find, vf.TasksetConfig]):
    """A task for each digit; two of them have the same prompt."""

    def load(self) -> Iterator[Find]:
        """Make the tasks."""
        for number in range(10):
            yield Find(Number(prompt=f"guess {number % 5}: more or less?", answer=str(number)), self.config.task)


class Asks(vf.Harness[vf.HarnessConfig]):
    """Asks once, in this process. The prompt is the conversation so far; verifiers' other harnesses start programs."""

    NEEDS_CONTAINER = EXECUTES_CODE = False
    SUPPORTS_RESUME = True

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):  # noqa: PLR0917
        """Ask through verifiers' proxy, which keeps the conversation."""
        talk = [{"role": "user", "content": data.prompt}] if isinstance(data.prompt, str) else data.prompt
        messages = [one if isinstance(one, dict) else one.model_dump(include={"role", "content"}) for one in talk]
        async with AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0) as client:
            await client.chat.completions.create(model=ctx.model, messages=messages)
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


class GuessConfig(vf.EnvConfig):
    """One seat."""

    solver: vf.AgentConfig = vf.AgentConfig()


class Guess(vf.Env[GuessConfig]):
    """Says more or less to a wrong answer."""

    async def run(self, task: Find, agents: vf.Agents) -> None:
        """Play a task."""
        wanted, tries = task.data.answer, 1
        async with agents.solver.interaction(task) as talk:
            segment = await talk.turn()
            while not segment.terminated and segment.last_reply != wanted and tries < TRIES:
                segment, tries = await talk.turn("more" if segment.last_reply < wanted else "less"), tries + 1
        talk.trace.record_reward("found", float(segment.last_reply == wanted))
        talk.trace.record_metric("tries", float(tries))
