"""Reads a turn's reasoning, text and tool calls from the sampled text.

If the tokenizer has a `response_template` (formerly `response_schema`), transformers' `parse_response` parses texts.
For other tokenizers, these tags are parsed:

    <think>reasoning</think>text<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>

A call whose content is not such JSON stays text. Parsing does not change the sampled tokens.
"""

import json
import logging
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, TypeAlias, cast

from jinja2 import TemplateError

from streamppo.rollout.endpoint import json_values
from streamppo.types import JsonObject, Message

THINK, THINK_END, CALL, CALL_END = "<think>", "</think>", "<tool_call>", "</tool_call>"
ID_CHARACTERS = string.ascii_letters + string.digits
CALLS = re.compile(f"{CALL}(.*?)(?:{CALL_END}|$)", re.DOTALL)
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, LookupError, ImportError, TemplateError, RecursionError)
"""Errors of `parse_response` for a text that does not fit the tokenizer's template."""

log = logging.getLogger(__name__)

Parse: TypeAlias = Callable[[str], object]


class ToolCall(NamedTuple):
    """A call of a tool. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Reply(NamedTuple):
    """The parts of a turn."""

    content: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()

    @property
    def message(self) -> Message:
        """The message in the form in which a program sends it back."""
        calls = tuple(
            {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls
        )
        return assistant(self.content, calls, self.reasoning)


def assistant(content: str, calls: Iterable[JsonObject], reasoning: object) -> Message:
    """Make an assistant's message; a `reasoning` other than a text is left out."""
    fields = {"reasoning_content": reasoning} if isinstance(reasoning, str) and reasoning else {}
    return Message(role="assistant", content=content or None, tool_calls=tuple(calls), fields=fields)


def read(text: str, *, opened: bool = False, parse: Parse | None = None) -> Reply:
    """Read a whole turn. `opened`: the turn's context ends with <think>. `parse` is the tokenizer's parser."""
    if parse is not None:
        try:
            return _from_fields(cast("Mapping[str, object]", parse(text)))
        except UNREADABLE as error:
            log.debug("the tokenizer's description does not fit a turn: %s", error)
            return Reply(text)
    reasoning, answer = _split_reasoning(text, opened=opened)
    calls = list[ToolCall]()

    def take(match: re.Match[str]) -> str:
        parsed = _parse_calls(match[1])
        calls.extend(parsed)
        return "" if parsed else match[0]

    content = CALLS.sub(take, answer)
    return Reply(content.rstrip() if calls else content, reasoning, tuple(calls))


def read_partial(text: str, *, opened: bool = False) -> Reply:
    """Read an unfinished turn, without its calls. The texts are prefixes of the whole turn's texts."""
    reasoning, answer = _split_reasoning(_drop_partial_mark(text), opened=opened)
    return Reply(answer.partition(CALL)[0].rstrip(), reasoning)


def _drop_partial_mark(text: str) -> str:
    for mark in (THINK, THINK_END, CALL):
        for length in range(len(mark) - 1, 0, -1):
            if text.endswith(mark[:length]):
                return text[:-length]
    return text


def _split_reasoning(text: str, *, opened: bool) -> tuple[str, str]:
    stripped = text.lstrip()
    if stripped.startswith(THINK):
        opened, text = True, stripped.removeprefix(THINK)
    if not opened:
        return "", text
    reasoning, end, answer = text.partition(THINK_END)
    return reasoning.strip(), answer.lstrip("\n") if end else ""


def _parse_calls(text: str) -> list[ToolCall]:
    try:
        value = json_values.read(text)
    except ValueError:
        return []
    items = value if isinstance(value, list) else [value]
    calls = [call for item in items if (call := _read_call(item)) is not None]
    return calls if len(calls) == len(items) else []


def _read_call(value: object) -> ToolCall | None:
    match value:
        case {"function": {"name": str(name), **fields}} | {"name": str(name), **fields} if name:
            arguments = fields.get("arguments", fields.get("parameters", {}))
        case _:
            return None
    # Mistral's templates accept no other form of ids.
    call_id = "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))
    return ToolCall(call_id, name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def _from_fields(fields: Mapping[str, object]) -> Reply:
    content, calls = fields.get("content"), fields.get("tool_calls") or ()
    reasoning = fields.get("reasoning_content") or fields.get("thinking") or fields.get("reasoning")
    parsed = [_read_call(item) for item in cast("list[object]", calls)]
    if any(call is None for call in parsed):
        raise ValueError("a tool call without a name")
    return Reply(
        content if isinstance(content, str) else "",
        reasoning if isinstance(reasoning, str) else "",
        tuple(call for call in parsed if call is not None),
    )
