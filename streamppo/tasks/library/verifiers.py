"""Environments of the `verifiers` library (extra `verifiers`); the policy's turns replace its model client.

    [task]         kind = "verifiers", environment = "wordle"                    its data set
    [environment]  name = "streamppo.tasks.library.verifiers:Verifiers"          its turns and its rubric
                   arguments = { environment = "wordle" }

verifiers runs the whole conversation itself and calls a client for every turn of the model. The client here passes the
messages on and waits for the policy's turn, so that the tokens stay as they were sampled. The environment parses tool
calls from the text.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import Protocol

from streamppo.config.task import VerifiersTask
from streamppo.errors import TaskError
from streamppo.tasks import chat, split
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.environments import Done
from streamppo.types import Message, Prompt


class TheirMessage(Protocol):
    """A message of verifiers."""

    role: str
    content: object


class TheirRubric(Protocol):
    """The scorers of an environment; they write their scores into the conversation's state."""

    async def score_rollout(self, state: Row) -> None:
        """Score a conversation."""
        ...


class TheirEnvironment(Protocol):
    """The part of verifiers' environments used here."""

    rubric: TheirRubric

    def get_dataset(self) -> Iterable[Row]:
        """Return the training rows."""
        ...

    def get_eval_dataset(self) -> Iterable[Row]:
        """Return the evaluation rows."""
        ...

    async def rollout(self, row: Row, client: object, model: str, sampling_args: Mapping[str, object]) -> Row:
        """Run a conversation; return its last state."""
        ...


class Rows:
    """The training and evaluation rows of an environment; without evaluation rows a share is held out."""

    def __init__(self, config: VerifiersTask, seed: int) -> None:
        name = config.environment
        environment = _environment(name)
        self.training: Sequence[Prompt] = [_prompt(row, name) for row in environment.get_dataset()]
        self.held_out: Sequence[Prompt] = [_prompt(row, name) for row in environment.get_eval_dataset()]
        keys, held_out = ([split.key(prompt.text) for prompt in rows] for rows in (self.training, self.held_out))
        self.notes = [*split.describe_repeats(keys, name)]
        if held_out and set(held_out) <= set(keys):
            # Without evaluation rows verifiers returns the training rows.
            self.training, self.held_out = split.divide(self.training, keys, config.held_out, seed)
        else:
            self.notes += split.describe_overlap(held_out, set(keys), name)


class Verifiers:
    """Runs one conversation; the environment's rubric gives the reward and metrics, on the last turn."""

    def __init__(self, environment: str) -> None:
        self._environment = _environment(environment)
        self._asked: asyncio.Queue[list[TheirMessage]] = asyncio.Queue()
        self._said: asyncio.Queue[str] = asyncio.Queue()
        self._seen = 0
        self._conversation: asyncio.Task[Row] | None = None

    async def reset(self, prompt: Prompt) -> tuple[Message, ...]:
        """Show the environment's first messages."""
        client = _client_class()(self)
        row = json.loads(prompt.columns["row"])
        rollout = self._environment.rollout(row, client, "policy", {})
        self._conversation = asyncio.ensure_future(rollout)
        observation = await self._next()
        if isinstance(observation, Done):
            raise TaskError("the environment ended before the policy's first turn")
        return observation

    async def step(self, text: str) -> tuple[Message, ...] | Done:
        """Pass on the policy's turn; return the environment's next messages, or its rewards."""
        self._said.put_nowait(text)
        return await self._next()

    async def close(self) -> None:
        """Cancel an unfinished conversation."""
        if self._conversation is not None:
            self._conversation.cancel()
            await asyncio.gather(self._conversation, return_exceptions=True)

    async def ask(self, messages: list[TheirMessage]) -> str:
        """Called by the client: pass `messages` on and wait for the model's next turn."""
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
        # Earlier messages and the policy's turn are already in the context, as sampled.
        fresh, self._seen = messages[self._seen :], len(messages) + 1
        return tuple(_message(message) for message in fresh)

    async def _verdict(self, state: Row) -> Done:
        if state.get("error") is not None:
            raise TaskError(f"the verifiers environment failed: {state['error']!r}")
        await self._environment.rubric.score_rollout(state)
        return Done(state["reward"], state.get("metrics") or {})


@cache
def _environment(name: str) -> TheirEnvironment:
    try:
        load_environment = import_module("verifiers").load_environment
    except ImportError as error:
        raise TaskError("this task needs verifiers: pip install 'streamppo[verifiers]'") from error
    try:
        return load_environment(name)
    # An environment is foreign code, which may raise any exception while it loads.
    except Exception as error:
        raise TaskError(f"verifiers cannot load the environment {name!r}: {error}") from error


@cache
def _client_class() -> type:
    """Make a subclass of their client in which only the method used by `rollout` works."""
    client_base = import_module("verifiers.clients").Client
    types = import_module("verifiers.types")

    async def get_response(
        self: _Client, prompt: list[TheirMessage], model: str, sampling_args: object, **more: object
    ) -> object:
        text = await self.client.ask(prompt)
        message = types.ResponseMessage(content=text, finish_reason="stop", is_truncated=False)
        return types.Response(id="", created=0, model=model, message=message)

    unused = dict.fromkeys(client_base.__abstractmethods__, NotImplemented)
    return type("PolicyClient", (client_base,), {**unused, "get_response": get_response})


class _Client(Protocol):
    """Their client; `client` is the argument of its constructor."""

    client: Verifiers


def _prompt(row: Row, source: str) -> Prompt:
    conversation = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
    messages = tuple(chat.message(message, f"a row of {source}") for message in conversation)
    columns = {"answer": row.get("answer", ""), "row": json.dumps(row, default=str)}
    text = "\n\n".join(message.text for message in messages)
    return Prompt(text=text, messages=messages, columns=columns, source=source)


def _message(theirs: TheirMessage) -> Message:
    call = getattr(theirs, "tool_call_id", None)
    return Message(
        role=theirs.role, content=_text(theirs.content), tool_call_id=call if isinstance(call, str) else None
    )


def _text(content: object) -> str:
    if not isinstance(content, str):
        raise TaskError(f"a message of the environment is no text: {content!r}")
    return content
