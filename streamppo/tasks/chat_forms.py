"""Converts messages to the forms that some chat templates demand."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any, TypeAlias

Fields: TypeAlias = dict[str, Any]
Chat: TypeAlias = Sequence[Fields]


def other_forms(chat: Chat) -> Iterator[Chat]:
    """Yield the messages in other forms, for a template that refuses their own."""
    for count in (1, 2, 3):
        for changes in combinations((text_arguments, named_answers, texts), count):
            changed = chat
            for change in changes:
                changed = change(changed)
            if changed != chat:
                yield changed


def text_arguments(chat: Chat) -> Chat:
    """Return the messages with the arguments of calls as JSON. DeepSeek's templates concatenate them with texts."""

    def with_text(call: Fields) -> Fields:
        function = call.get("function")
        if not isinstance(function, dict) or isinstance(function.get("arguments"), str):
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function.get("arguments"))}}

    return [
        {**message, "tool_calls": list(map(with_text, message["tool_calls"]))} if "tool_calls" in message else message
        for message in chat
    ]


def named_answers(chat: Chat) -> Chat:
    """Return the messages with the tool's name in each answer, which Hermes' templates demand and OpenAI leaves out."""
    calls = [call for message in chat for call in message.get("tool_calls", ())]
    names = {call.get("id"): call["function"]["name"] for call in calls if _has_name(call)}
    return [
        {**message, "name": names[message.get("tool_call_id")]}
        if message["role"] == "tool" and "name" not in message and message.get("tool_call_id") in names
        else message
        for message in chat
    ]


def _has_name(call: Fields) -> bool:
    function = call.get("function")
    return isinstance(function, dict) and "name" in function


def texts(chat: Chat) -> Chat:
    """Return the messages with a content. A message with calls may have none, as OpenAI's."""
    empty = parts("") if any(isinstance(message["content"], list) for message in chat) else ""
    return [{**message, "content": empty if message["content"] is None else message["content"]} for message in chat]


def parts(content: object) -> object:
    """Return a text as a list of one part. Example: [{"type": "text", "text": "1+2"}]."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
