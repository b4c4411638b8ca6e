"""Environments of the `verifiers` library (extra `verifiers`), with the policy's turns in place of its model client.

    [task]         kind = "verifiers", environment = "wordle"            its data set
    [environment]  name = "streamppo.tasks.library.verifiers:Verifiers"          its turns and its rubric
                   arguments = { environment = "wordle" }

verifiers runs the whole conversation itself and asks a client for every turn of the model. The client here hands the
question over and waits for what the policy says; so tokens stay where they were sampled. Tool calls are for the
environment to read out of the text.
"""

import asyncio
import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from streamppo.config.task import VerifiersTask
from streamppo.errors import TaskError
from streamppo.tasks.environments import Done
from streamppo.types import Message, Prompt


class Rows:
    """The training and evaluation rows of an environment."""

    def __init__(self, config: VerifiersTask) -> None:
        made = _environment(config.environment)
        self.training: Sequence[Prompt] = [_prompt(row, config.environment) for row in made.get_dataset()]
        self.held_out: Sequence[Prompt] = [_prompt(row, config.environment) for row in made.get_eval_dataset()]


class Verifiers:
    """One conversation; its reward and metrics are those of the environment's rubric, on the last turn."""

    def __init__(self, environment: str) -> None:
        self._environment = _environment(environment)
        self._asked: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._seen = 0
        self._conversation: asyncio.Task[Any] | None = None

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        """The environment's first messages."""
        client = _client_class()(self)
        row = json.loads(prompt.columns["row"])
        self._conversation = asyncio.create_task(self._environment.rollout(row, client, "policy", {}))
        said = await self._next()
        if isinstance(said, Done):
            raise TaskError("the environment ended before the policy's first turn")
        return said

    async def step(self, text: str) -> tuple[Message, ...] | Done:
        """What the environment says to `text`, or its verdict."""
        self._said.put_nowait(text)
        return await self._next()

    async def close(self) -> None:
        """End a conversation that is not over."""
        if self._conversation is not None:
            self._conversation.cancel()
            await asyncio.gather(self._conversation, return_exceptions=True)

    async def ask(self, messages: list[Any]) -> str:
        """The client's side: the environment wants the model's next turn."""
        self._asked.put_nowait(messages)
        return await self._said.get()

    async def _next(self) -> tuple[Message, ...] | Done:
        conversation, asked = self._conversation, asyncio.create_task(self._asked.get())
        assert conversation is not None
        try:
            await asyncio.wait({asked, conversation}, return_when=asyncio.FIRST_COMPLETED)
            if conversation.done():
                return await self._verdict(conversation.result())
        finally:
            asked.cancel()
        messages = asked.result()
        # What was shown before, and the policy's own turn, are in the context as they were sampled.
        fresh, self._seen = messages[self._seen :], len(messages) + 1
        return tuple(Message(role=message.role, content=_text(message.content)) for message in fresh)

    async def _verdict(self, state: Any) -> Done:
        if state.get("error") is not None:
            raise TaskError(f"the verifiers environment failed: {state['error']!r}")
        await self._environment.rubric.score_rollout(state)
        return Done(state["reward"], state.get("metrics") or {})


@cache
def _environment(name: str) -> Any:
    try:
        from verifiers import load_environment  # pyright: ignore
    except ImportError as error:
        raise TaskError("this task needs verifiers: pip install 'streamppo[verifiers]'") from error
    try:
        return load_environment(name)
    except Exception as error:
        raise TaskError(f"verifiers cannot load the environment {name!r}: {error}") from error


@cache
def _client_class() -> Any:
    """A client of theirs whose only working method is the one that `rollout` calls."""
    from verifiers.clients import Client  # pyright: ignore[reportMissingImports]
    from verifiers.types import Response, ResponseMessage  # pyright: ignore[reportMissingImports]

    async def get_response(self: Any, prompt: list[Any], model: str, sampling_args: Any, **more: Any) -> Any:
        text = await self.client.ask(prompt)
        message = ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return Response(id="", created=0, model=model, message=message)

    unused = dict.fromkeys(Client.__abstractmethods__, NotImplemented)
    return type("PolicyClient", (Client,), {**unused, "get_response": get_response})


def _prompt(row: dict[str, Any], source: str) -> Prompt:
    messages = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    told = tuple(Message(role=message["role"], content=_text(message["content"])) for message in messages)
    columns = {"answer": row.get("answer", ""), "row": json.dumps(row, default=str)}
    text = "\n\n".join(message.content for message in told)
    return Prompt(text=text, messages=told, columns=columns, source=source)


def _text(content: Any) -> str:
    if not isinstance(content, str):
        raise TaskError(f"a message of the environment is no text: {content!r}")
    return content
