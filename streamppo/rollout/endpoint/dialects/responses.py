"""OpenAI's responses: POST /v1/responses. With `previous_response_id`, a request has only new messages."""

from collections.abc import Sequence

from streamppo.rollout.endpoint import reply
from streamppo.rollout.endpoint.dialects import wire
from streamppo.rollout.endpoint.dialects.chat import ROLES, Chat
from streamppo.rollout.endpoint.dialects.wire import Body
from streamppo.rollout.endpoint.reply import Reply
from streamppo.rollout.endpoint.request import Request, RequestRefused, Turn, malformed
from streamppo.types import JsonObject, Message

OF_ASSISTANT = ("reasoning", "function_call")


class Responses:
    """The `Dialect` of OpenAI's responses."""

    keep_alive = b": keep-alive\n\n"

    def read(self, body: Body) -> Request:
        wire.refuse_absent(body)
        wire.refuse(body, "background", "an answer comes on the connection that asks for it")
        wire.refuse(body, "conversation", "send the messages, or previous_response_id")
        conversation = body.get("input")
        items = (
            [{"role": "user", "content": conversation}]
            if isinstance(conversation, str)
            else wire.object_list(conversation, "input")
        )
        instructions = wire.text(body.get("instructions"), "the instructions")
        first = (Message(role="system", content=instructions),) if instructions else ()
        messages = (*first, *_messages(items))
        if not messages:
            raise malformed("input is empty")
        return Request(
            messages=messages,
            tools=wire.tools(body, _tool),
            arguments=wire.arguments_of(body),
            max_tokens=wire.token_limit(body, "max_output_tokens"),
            stop=wire.stops(body, "stop"),
            stream=body.get("stream") is True,
            after=str(body.get("previous_response_id") or ""),
        )

    def complete(self, turns: Sequence[Turn], model: str) -> Body:
        (turn,) = turns
        assert turn.reply is not None
        return _response(turn, model, _items(turn, turn.reply))

    def stream(self, turn: Turn, model: str, body: Body) -> "ResponseStream":
        return ResponseStream(turn, model)

    def error(self, error: RequestRefused) -> Body:
        return Chat().error(error)


class ResponseStream:
    """A `Stream` of items: reasoning, the message, function calls."""

    def __init__(self, turn: Turn, model: str) -> None:
        self._turn, self._model = turn, model
        self._sent = Reply("")
        self._item, self._open, self._number = -1, "", -1

    def begin(self) -> bytes:
        return self._event("created", response=_response(self._turn, self._model, []))

    def extend(self, partial: Reply) -> bytes:
        (thought, content), self._sent = wire.new_texts(self._sent, partial), partial
        parts: list[bytes] = []
        if thought:
            parts += [self._enter("reasoning"), self._delta("reasoning_text", thought)]
        if content:
            parts += [self._enter("message"), self._delta("output_text", content)]
        return b"".join(parts)

    def end(self, turn: Turn) -> bytes:
        assert turn.reply is not None
        parts = [self.extend(turn.reply)]
        items = _items(turn, turn.reply)
        if not turn.reply.content and not turn.reply.calls:
            parts.append(self._enter("message"))
        parts.append(self._leave())
        for item in (item for item in items if item["type"] == "function_call"):
            self._item += 1
            parts.append(self._event("output_item.added", item={**item, "arguments": "", "status": "in_progress"}))
            ids = {"item_id": item["id"], "name": item["name"]}
            parts.append(self._event("function_call_arguments.delta", item_id=item["id"], delta=item["arguments"]))
            parts.append(self._event("function_call_arguments.done", **ids, arguments=item["arguments"]))
            parts.append(self._event("output_item.done", item=item))
        response = _response(turn, self._model, items)
        parts.append(self._event("completed" if turn.finish == "stop" else "incomplete", response=response))
        return b"".join(parts)

    def _enter(self, kind: str) -> bytes:
        if self._open == kind:
            return b""
        left = self._leave()
        self._open = kind
        self._item += 1
        empty = _text_item(kind, self._turn, "")
        item = {**empty, "content": [], "status": "in_progress"}
        added = self._event("output_item.added", item=item)
        return left + added + self._event("content_part.added", **_place(empty), part=empty["content"][0])

    def _delta(self, kind: str, text: str) -> bytes:
        more = {"logprobs": []} if kind == "output_text" else {}
        place = _place(_text_item(self._open, self._turn, ""))
        return self._event(f"{kind}.delta", **place, delta=text, **more)

    def _leave(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        thought = kind == "reasoning"
        text = self._sent.reasoning if thought else self._sent.content
        item = _text_item(kind, self._turn, text)
        place, name = _place(item), "reasoning_text" if thought else "output_text"
        extra_fields = {} if thought else {"logprobs": []}
        events = self._event(f"{name}.done", **place, text=text, **extra_fields)
        events += self._event("content_part.done", **place, part=item["content"][0])
        return events + self._event("output_item.done", item=item)

    def _event(self, kind: str, **fields: object) -> bytes:
        self._number += 1
        index = {} if "response" in fields else {"output_index": self._item}
        kind = f"response.{kind}"
        return wire.event({"type": kind, "sequence_number": self._number, **index, **fields}, kind)


def _messages(items: Sequence[Body]) -> list[Message]:
    messages, parts = list[Message](), list[Body]()
    for item in [*items, {}]:
        kind = item.get("type", "message" if "role" in item else "")
        if kind in OF_ASSISTANT or (kind == "message" and item.get("role") == "assistant"):
            parts.append(item)
            continue
        if parts:
            messages.append(_assistant(parts))
            parts = []
        if item:
            messages.append(_message(item, str(kind)))
    return messages


def _message(item: Body, kind: str) -> Message:
    if kind == "function_call_output":
        return Message(
            role="tool", content=wire.text(item.get("output"), "a tool's output"), tool_call_id=str(item.get("call_id"))
        )
    if kind != "message":
        raise malformed(f"an item of the input is a message, a function call or its output, not {kind or item!r}")
    role = wire.role(item, ROLES)
    return Message(role=role, content=wire.text(item.get("content"), f"a message of the {item['role']}"))


def _assistant(parts: Sequence[Body]) -> Message:
    calls = [
        wire.call(part.get("call_id"), part.get("name"), part.get("arguments"))
        for part in parts
        if part.get("type") == "function_call"
    ]
    texts = [part for part in parts if part.get("type", "message") == "message"]
    thoughts = [
        str(thought.get("text", ""))
        for part in parts
        if part.get("type") == "reasoning"
        for thought in wire.object_list(part.get("content") or [], "content")
    ]
    text = "".join(wire.text(item.get("content"), "a message of the assistant") for item in texts)
    message = reply.assistant(text, calls, "".join(thoughts))
    name = next((item["id"] for item in texts if isinstance(item.get("id"), str)), "")
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=message.tool_calls,
        fields={**message.fields, **({"id": name} if name else {})},
    )


def _tool(item: Body) -> JsonObject:
    if item.get("type") != "function":
        raise malformed(f"a tool is a function, not {item.get('type')!r}")
    return wire.tool(item.get("name"), item.get("description"), item.get("parameters"))


def _items(turn: Turn, answer: Reply) -> list[Body]:
    items = [_reasoning(turn, answer.reasoning)] if answer.reasoning else []
    if answer.content or not answer.calls:
        items.append(_text(turn, answer.content))
    calls = ({"call_id": call.id, "name": call.name, "arguments": call.arguments} for call in answer.calls)
    return [
        *items,
        *({"type": "function_call", "id": f"fc_{call['call_id']}", "status": "completed", **call} for call in calls),
    ]


def _reasoning(turn: Turn, text: str) -> JsonObject:
    content = [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": content, "status": "completed"}


def _text(turn: Turn, text: str) -> JsonObject:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}]
    known = {"role": "assistant", "status": "completed", "content": content}
    return {"type": "message", "id": turn.message_id, **known}


def _text_item(kind: str, turn: Turn, text: str) -> JsonObject:
    return _reasoning(turn, text) if kind == "reasoning" else _text(turn, text)


def _place(item: Body) -> Body:
    return {"item_id": item["id"], "content_index": 0}


def _response(turn: Turn, model: str, items: Sequence[Body]) -> Body:
    is_ended, cut = turn.reply is not None, turn.finish == "length"
    usage = {
        "input_tokens": turn.context,
        "input_tokens_details": {"cached_tokens": turn.cached, "cache_write_tokens": 0},
        "output_tokens": turn.tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.context + turn.tokens,
    }
    return {
        "id": turn.id,
        "object": "response",
        "created_at": wire.now(),
        "status": ("incomplete" if cut else "completed") if is_ended else "in_progress",
        "incomplete_details": {"reason": "max_output_tokens"} if is_ended and cut else None,
        "error": None,
        "model": model,
        "output": list(items),
        "parallel_tool_calls": True,
        "previous_response_id": turn.request.after or None,
        "tool_choice": "auto",
        "tools": [],
        "metadata": {},
        "usage": usage if is_ended else None,
    }
