"""A request to the endpoint, and its outcome: a turn of the policy, or a refusal."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from streamppo.rollout.endpoint.reply import Reply
from streamppo.rollout.endpoint.tree import digest
from streamppo.types import JsonObject, Message

NO_REPLY = Reply("")


class Request(NamedTuple):
    """A request of any dialect. `arguments` are for the chat template. `after` is the id of an earlier answer."""

    messages: tuple[Message, ...]
    tools: tuple[JsonObject, ...] = ()
    arguments: Mapping[str, Any] = {}
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    after: str = ""
    answers: int = 1
    logprobs: bool = False

    @property
    def setting(self) -> dict[str, object]:
        """The parameters, besides the messages, on which a context depends."""
        return {"tools": self.tools, "arguments": self.arguments}

    def key(self) -> tuple[object, ...]:
        """A value that equal requests share. They may differ in `stream`, `after` and `answers`."""
        setting = digest(Message(role="", content="", fields=self.setting))
        return (*map(digest, self.messages), setting, self.max_tokens, self.stop, self.logprobs)


@dataclass(eq=False)
class Turn:
    """A turn of the policy: under way, or ended with `reply`. `listeners` connections wait for the turn.

    Turns are numbered from 1 as they end (0: under way). `ended_before` turns had ended when the context was looked up.
    """

    id: str
    request: Request
    admitted: asyncio.Future[None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    listeners: int = 0
    number: int = 0
    ended_before: int = 0
    context: int = 0
    partial: Reply = NO_REPLY
    shown_s: float = 0.0
    opened: bool = False
    text: str = ""
    reply: Reply | None = None
    finish: Literal["stop", "length"] = "stop"
    tokens: int = 0
    cached: int = 0
    delivered: bool = False
    reward: float = 0.0
    error: Exception | None = None
    task: asyncio.Task[None] | None = None
    names: tuple[str, ...] = ()
    """Other ids of the turn: those of its message and its tool calls."""
    stop_string: str = ""
    """The stop string of the request that ended the turn."""
    spelled: Message | None = None
    """The answer including the stop string, because some programs send it back with the string."""
    new: tuple[Message, ...] = ()
    logprobs: Sequence[tuple[str, float]] = ()
    """The text and log-prob of each token, if the request asks for them."""

    @property
    def message_id(self) -> str:
        """The id of the turn's message, in dialects whose messages have ids."""
        return f"msg_{self.id}"


class RequestRefused(Exception):
    """A refused request: HTTP status, error code, message, and `reason`, by which refusals are counted."""

    def __init__(self, status: int, code: str, message: str, reason: str) -> None:
        super().__init__(message)
        self.status, self.code, self.reason = status, code, reason


def malformed(message: str, reason: str = "unusable request") -> RequestRefused:
    """Make the refusal of a malformed request."""
    return RequestRefused(400, "invalid_request_error", message, reason)


def run_ended() -> RequestRefused:
    """Make the refusal of a request of an ended run."""
    return RequestRefused(
        410, "session_ended", "the run of this key has ended: nothing more is sampled for it", "after its end"
    )


def over_budget(message: str) -> RequestRefused:
    """Make the refusal of a request beyond the run's budget."""
    return RequestRefused(400, "context_length_exceeded", message, "over budget")
