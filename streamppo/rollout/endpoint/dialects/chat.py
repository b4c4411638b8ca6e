"""OpenAI's chat completions: POST /v1/chat/completions."""

from collections.abc import Sequence

from streamppo.rollout.endpoint import reply
from streamppo.rollout.endpoint.dialects import wire
from streamppo.rollout.endpoint.dialects.wire import Body
from streamppo.rollout.endpoint.reply import Reply, ToolCall
from streamppo.rollout.endpoint.request import Request, RequestRefused, Turn, malformed
from streamppo.types import JsonObject, Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class Chat:
    """The `Dialect` of OpenAI's chat completions."""

    keep_alive = b": keep-alive\n\n"

    def read(self, body: Body) -> Request:
        # Of all dialects, only this one can answer with log-probs.
        wire.refuse_absent({**body, "logprobs": None})
        wire.refuse(body, "best_of", "ask for n answers", 1)
        answers = wire.positive(body, "n", "answers") or 1
        if answers > 1 and body.get("stream") is True:
            raise malformed(
                "n is not possible here with stream: send one request for each answer", "unusable parameter"
            )
        messages = wire.object_list(body.get("messages"), "messages")
        if not messages:
            raise malformed("messages is empty")
        return Request(
            messages=tuple(map(_message, messages)),
            tools=wire.tools(body, _tool),
            arguments=wire.arguments_of(body),
            max_tokens=wire.token_limit(body, "max_completion_tokens", "max_tokens"),
            stop=wire.stops(body, "stop"),
            stream=body.get("stream") is True,
            answers=answers,
            logprobs=body.get("logprobs") is True,
        )

    def complete(self, turns: Sequence[Turn], model: str) -> Body:
        choices = [{"index": number, **self._choice(turn)} for number, turn in enumerate(turns)]
        return {**_head(turns[0], model, "chat.completion"), "choices": choices, "usage": _usage(turns)}

    def _choice(self, turn: Turn) -> Body:
        assert turn.reply is not None
        message: JsonObject = {"role": "assistant", "content": turn.reply.content or None, "refusal": None}
        if not turn.reply.calls:
            message["content"] = turn.reply.content
        if turn.reply.reasoning:
            message["reasoning_content"] = turn.reply.reasoning
        if turn.reply.calls:
            message["tool_calls"] = [_call(call) for call in turn.reply.calls]
        return {"message": message, "finish_reason": _finish(turn), "logprobs": _logprobs(turn)}

    def stream(self, turn: Turn, model: str, body: Body) -> "ChatStream":
        options = body.get("stream_options") or {}
        return ChatStream(turn, model, usage=isinstance(options, dict) and options.get("include_usage") is True)

    def error(self, error: RequestRefused) -> Body:
        kind = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error"}
        return {
            "error": {
                "message": str(error),
                "type": kind.get(error.status, "invalid_request_error"),
                "param": None,
                "code": error.code,
            }
        }


class ChatStream:
    """A `Stream` of chunks, with [DONE] at the end."""

    def __init__(self, turn: Turn, model: str, *, usage: bool) -> None:
        self._head, self._usage = _head(turn, model, "chat.completion.chunk"), usage
        self._sent = Reply("")

    def begin(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def extend(self, partial: Reply) -> bytes:
        (thought, content), self._sent = wire.new_texts(self._sent, partial), partial
        deltas = {"reasoning_content": thought, "content": content}
        return b"".join(self._chunk({name: text}) for name, text in deltas.items() if text)

    def end(self, turn: Turn) -> bytes:
        assert turn.reply is not None
        chunks = [self.extend(turn.reply)]
        for number, call in enumerate(turn.reply.calls):
            chunks.append(self._chunk({"tool_calls": [{"index": number, **_call(call)}]}))
        more = {"logprobs": logprobs} if (logprobs := _logprobs(turn)) else {}
        chunks.append(self._chunk({}, _finish(turn), **more))
        if self._usage:
            chunks.append(wire.event({**self._head, "choices": [], "usage": _usage([turn])}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def _chunk(self, delta: Body, finish: str | None = None, **more: Body) -> bytes:
        return wire.event({**self._head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish, **more}]})


def _message(item: Body) -> Message:
    role = wire.role(item, ROLES)
    content = wire.text(item.get("content"), f"a message of the {item['role']}")
    name = item.get("name")
    if role == "assistant":
        calls = [_read_call(call) for call in wire.object_list(item.get("tool_calls") or [], "tool_calls")]
        return reply.assistant(content, calls, item.get("reasoning_content") or item.get("reasoning"))
    return Message(
        role=role,
        content=content,
        name=name if isinstance(name, str) else None,
        tool_call_id=str(item["tool_call_id"]) if item.get("tool_call_id") else None,
    )


def _read_call(item: Body) -> JsonObject:
    function = item.get("function")
    if not isinstance(function, dict):
        raise malformed(f"a tool call must call a function, not {item.get('type')!r}")
    return wire.call(item.get("id"), function.get("name"), function.get("arguments"))


def _tool(item: Body) -> JsonObject:
    function = item.get("function")
    if item.get("type", "function") != "function" or not isinstance(function, dict):
        raise malformed(f"a tool is a function, not {item.get('type')!r}")
    return wire.tool(function.get("name"), function.get("description"), function.get("parameters"))


def _call(call: ToolCall) -> Body:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finish(turn: Turn) -> str:
    return "tool_calls" if turn.reply and turn.reply.calls else turn.finish


def _logprobs(turn: Turn) -> Body | None:
    if not turn.request.logprobs:
        return None
    return {
        "content": [
            {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}
            for text, logprob in turn.logprobs
        ],
        "refusal": None,
    }


def _usage(turns: Sequence[Turn]) -> Body:
    context, tokens = turns[0].context, sum(turn.tokens for turn in turns)
    return {
        "prompt_tokens": context,
        "prompt_tokens_details": {"cached_tokens": turns[0].cached},
        "completion_tokens": tokens,
        "total_tokens": context + tokens,
    }


def _head(turn: Turn, model: str, kind: str) -> Body:
    return {"id": turn.id, "object": kind, "created": wire.now(), "model": model}
