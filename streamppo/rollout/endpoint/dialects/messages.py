"""Anthropic's messages: POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterator, Sequence
from typing import Any

from streamppo.rollout.endpoint import json_values, reply
from streamppo.rollout.endpoint.dialects import wire
from streamppo.rollout.endpoint.dialects.wire import Body
from streamppo.rollout.endpoint.reply import Reply
from streamppo.rollout.endpoint.request import Request, RequestRefused, Turn, malformed
from streamppo.types import JsonObject, Message

ROLES = {role: role for role in ("user", "assistant", "system")}
ERRORS = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
}


class Messages:
    """The `Dialect` of Anthropic's messages."""

    keep_alive = wire.event({"type": "ping"}, "ping")

    def read(self, body: Body) -> Request:
        wire.refuse_absent(body)
        messages = wire.object_list(body.get("messages"), "messages")
        if not messages:
            raise malformed("messages is empty")
        system = wire.text(body.get("system"), "the system prompt")
        first = (Message(role="system", content=system),) if system else ()
        return Request(
            messages=(*first, *(message for item in messages for message in _messages(item))),
            tools=wire.tools(body, _tool),
            arguments=wire.arguments_of(body),
            max_tokens=wire.token_limit(body, "max_tokens"),
            stop=wire.stops(body, "stop_sequences"),
            stream=body.get("stream") is True,
        )

    def complete(self, turns: Sequence[Turn], model: str) -> Body:
        (turn,) = turns
        assert turn.reply is not None
        usage = {"input_tokens": turn.context, "output_tokens": turn.tokens}
        head = {**_head(turn, model), "content": _blocks(turn.reply)}
        return {**head, **_end(turn), "usage": usage}

    def stream(self, turn: Turn, model: str, body: Body) -> "MessageStream":
        return MessageStream(turn, model)

    def error(self, error: RequestRefused) -> Body:
        kind = ERRORS.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": str(error)}}


class MessageStream:
    """A `Stream` of blocks: reasoning, text, tool calls."""

    def __init__(self, turn: Turn, model: str) -> None:
        self._turn, self._model = turn, model
        self._sent = Reply("")
        self._block, self._open = -1, ""

    def begin(self) -> bytes:
        usage = {"input_tokens": self._turn.context, "output_tokens": 0}
        empty = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message={**_head(self._turn, self._model), **empty})

    def extend(self, partial: Reply) -> bytes:
        (thought, content), self._sent = wire.new_texts(self._sent, partial), partial
        parts: list[bytes] = []
        if thought:
            parts += [self._enter("thinking"), self._delta(type="thinking_delta", thinking=thought)]
        if content:
            parts += [self._enter("text"), self._delta(type="text_delta", text=content)]
        return b"".join(parts)

    def end(self, turn: Turn) -> bytes:
        assert turn.reply is not None
        parts = [self.extend(turn.reply)]
        if not turn.reply.calls and not turn.reply.content:
            parts.append(self._enter("text"))
        for call in turn.reply.calls:
            parts += [self._leave(), self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})]
            parts.append(self._delta(type="input_json_delta", partial_json=call.arguments))
            self._open = "tool_use"
        usage = {"input_tokens": turn.context, "output_tokens": turn.tokens}
        parts += [self._leave(), _event("message_delta", delta=_end(turn), usage=usage), _event("message_stop")]
        return b"".join(parts)

    def _enter(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}[kind]
        left = self._leave()
        self._open = kind
        return left + self._begin({"type": kind, **empty})

    def _begin(self, block: Body) -> bytes:
        self._block += 1
        return _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, **delta: str) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._block)


def _messages(item: Body) -> Iterator[Message]:
    """Read one message of the dialect. Each tool result in it becomes a message before that with the user's text."""
    role, content = wire.role(item, ROLES), item.get("content")
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else wire.object_list(content, "content")
    if role == "assistant":
        yield _assistant(blocks)
        return
    for block in (block for block in blocks if block.get("type") == "tool_result"):
        result = wire.text(block.get("content"), "a tool's result")
        yield Message(role="tool", content=result, tool_call_id=str(block.get("tool_use_id")))
    other_blocks = [block for block in blocks if block.get("type") != "tool_result"]
    if other_blocks or not blocks:
        yield Message(role=role, content=wire.text(other_blocks, f"a message of the {role}"))


def _assistant(blocks: Any) -> Message:
    thoughts = [block for block in blocks if block.get("type") in ("thinking", "redacted_thinking")]
    calls = [
        wire.call(block.get("id"), block.get("name"), block.get("input"))
        for block in blocks
        if block.get("type") == "tool_use"
    ]
    known = ("thinking", "redacted_thinking", "tool_use")
    text = wire.text([block for block in blocks if block.get("type") not in known], "a message of the assistant")
    return reply.assistant(text, calls, "".join(str(thought.get("thinking", "")) for thought in thoughts))


def _tool(item: Body) -> JsonObject:
    if item.get("type") not in (None, "custom"):
        raise malformed(f"a tool must be the program's own, not {item.get('type')!r}, which Anthropic runs")
    return wire.tool(item.get("name"), item.get("description"), item.get("input_schema"))


def _blocks(answer: Reply) -> list[Body]:
    blocks: list[Body] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    return [
        *blocks,
        *({"type": "tool_use", "id": c.id, "name": c.name, "input": _input(c.arguments)} for c in answer.calls),
    ]


def _input(arguments: str) -> object:
    try:
        values = json_values.read(arguments)
    except ValueError:
        return {"arguments": arguments}
    return values if isinstance(values, dict) else {"arguments": values}


def _end(turn: Turn) -> Body:
    return {"stop_reason": _reason(turn), "stop_sequence": turn.stop_string or None}


def _reason(turn: Turn) -> str:
    if turn.reply and turn.reply.calls:
        return "tool_use"
    if turn.stop_string:
        return "stop_sequence"
    return "max_tokens" if turn.finish == "length" else "end_turn"


def _head(turn: Turn, model: str) -> Body:
    return {"id": turn.id, "type": "message", "role": "assistant", "model": model}


def _event(kind: str, **fields: object) -> bytes:
    return wire.event({"type": kind, **fields}, kind)
