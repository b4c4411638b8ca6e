"""What a turn says: its reasoning, its text and its tool calls, read from the sampled text.

A tokenizer with a `response_schema` says how (transformers' `parse_response`). Of others the marks that most templates
use are read:

    <think>reasoning</think>text<tool_call>{"name": "sum", "arguments": {"a": 1}}</tool_call>

A call that is no JSON of this form stays text. What is sampled is never changed by what is read from it.
"""

import json
import logging
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias, cast

from jinja2 import TemplateError

from streamppo.rollout.endpoint import json_values
from streamppo.types import Message

THINK, THOUGHT, CALL, CALLED = "<think>", "</think>", "<tool_call>", "</tool_call>"
SIGNS = string.ascii_letters + string.digits
CALLS = re.compile(f"{CALL}(.*?)(?:{CALLED}|$)", re.DOTALL)
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, LookupError, ImportError, TemplateError, RecursionError)
"""Errors of `parse_response` for a text that its schema does not fit."""

log = logging.getLogger(__name__)

Parse: TypeAlias = Callable[[str], object]


class ToolCall(NamedTuple):
    """A call of a tool: `arguments` are JSON."""

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
        """The message as a program sends it back."""
        calls = tuple({"id": one.id, "function": {"name": one.name, "arguments": one.arguments}} for one in self.calls)
        return assistant(self.content, calls, self.reasoning)


def assistant(content: str, calls: Iterable[dict[str, Any]], reasoning: object) -> Message:
    """Make an assistant's message; a `reasoning` that is no text is left out."""
    fields = {"reasoning_content": reasoning} if isinstance(reasoning, str) and reasoning else {}
    return Message(role="assistant", content=content or None, tool_calls=tuple(calls), fields=fields)


def read(text: str, *, opened: bool = False, parse: Parse | None = None) -> Reply:
    """Read a whole turn. `opened` says that the template has begun its reasoning; `parse` is that of a schema."""
    if parse is not None:
        try:
            return _of_schema(cast("Mapping[str, object]", parse(text)))
        except UNREADABLE as error:
            log.debug("the tokenizer's response_schema does not fit a turn: %s", error)
            return Reply(text)
    reasoning, rest = _thoughts(text, opened=opened)
    calls = list[ToolCall]()

    def take(found: re.Match[str]) -> str:
        made = _call(found[1])
        calls.extend(made)
        return "" if made else found[0]

    content = CALLS.sub(take, rest)
    return Reply(content.rstrip() if calls else content, reasoning, tuple(calls))


def so_far(text: str, *, opened: bool = False) -> Reply:
    """Read a turn that goes on: the beginning of what `read` will find, without calls."""
    reasoning, rest = _thoughts(_settled(text), opened=opened)
    return Reply(rest.partition(CALL)[0].rstrip(), reasoning)


def new_id(kind: str) -> str:
    """Make an id of ours: "resp", for one."""
    return f"{kind}_{secrets.token_hex(12)}"


def _call_id() -> str:
    """Make the id of a tool call, in the only form that Mistral's templates take."""
    return "".join(secrets.choice(SIGNS) for _ in range(9))


def _settled(text: str) -> str:
    """`text` without a beginning of a mark at its end."""
    for mark in (THINK, THOUGHT, CALL):
        for length in range(len(mark) - 1, 0, -1):
            if text.endswith(mark[:length]):
                return text[:-length]
    return text


def _thoughts(text: str, *, opened: bool) -> tuple[str, str]:
    """Divide a text into reasoning and the rest."""
    begun = text.lstrip()
    if begun.startswith(THINK):
        opened, text = True, begun.removeprefix(THINK)
    if not opened:
        return "", text
    reasoning, ended, rest = text.partition(THOUGHT)
    return reasoning.strip(), rest.lstrip("\n") if ended else ""


def _call(text: str) -> list[ToolCall]:
    """The calls in one mark: an object, or a list of such; none if it is neither, or not JSON for all programs."""
    try:
        found = json_values.read(text)
    except ValueError:
        return []
    listed = found if isinstance(found, list) else [found]
    calls = [made for one in listed if (made := _one_call(one)) is not None]
    return calls if len(calls) == len(listed) else []


def _one_call(found: object) -> ToolCall | None:
    match found:
        case {"function": {"name": str(name), **rest}} | {"name": str(name), **rest} if name:
            arguments = rest.get("arguments", rest.get("parameters", {}))
        case _:
            return None
    return ToolCall(_call_id(), name, arguments if isinstance(arguments, str) else json.dumps(arguments))


def _of_schema(found: Mapping[str, object]) -> Reply:
    content, calls = found.get("content"), found.get("tool_calls") or ()
    reasoning = found.get("reasoning_content") or found.get("thinking") or found.get("reasoning")
    made = [_one_call(one) for one in cast("list[object]", calls)]
    if any(one is None for one in made):
        raise ValueError("a tool call without a name")
    return Reply(
        content if isinstance(content, str) else "",
        reasoning if isinstance(reasoning, str) else "",
        tuple(one for one in made if one is not None),
    )
