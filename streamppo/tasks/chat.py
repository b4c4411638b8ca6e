"""Reads messages, tools and template arguments from rows of data sets, in OpenAI's and transformers' forms."""

import json
from collections.abc import Mapping
from typing import cast

import msgspec

from streamppo.errors import TaskError
from streamppo.tasks.dataset_files import QUOTED, Row
from streamppo.types import Message, Template

ARGUMENTS = "chat_template_kwargs"
"""TRL's column of chat template arguments."""
PARTS = ("text", "input_text", "output_text")
"""OpenAI's types of text parts in a message."""


def message(item: object, where: str) -> Message:
    """Read one message, a dict or its JSON, without nulls. Raises `TaskError` if `item` is not a message."""
    match item := _parse_column(item):
        case {"role": str(role), **other_fields}:
            fields = cast("dict[str, object]", _without_nulls(other_fields))
        case _:
            raise TaskError(f"{where}: a message has the texts `role` and `content`, this is {item!r:.{QUOTED}}")
    content = _text(fields.pop("content", None), where)
    if not isinstance(content, str) and (content is not None or not fields.get("tool_calls")):
        raise TaskError(f"{where}: a message has the texts `role` and `content`, this is {item!r:.{QUOTED}}")
    if isinstance(calls := fields.get("tool_calls"), list):
        fields["tool_calls"] = [_read_arguments(call) for call in cast("list[object]", calls)]
    known = {name: fields.pop(name) for name in ("name", "tool_calls", "tool_call_id") if name in fields}
    try:
        converted = msgspec.convert({"role": role, "content": content, **known, "fields": fields}, Message)
        # The message must be encodable, because it is sent to other processes.
        msgspec.msgpack.encode(converted)
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise TaskError(f"{where}: not a message for a chat template: {error}: {item!r:.{QUOTED}}") from error
    return converted


def template(row: Row, tools: str, base: Template, where: str) -> Template:
    """Add to `base` the tools (column `tools`) and `ARGUMENTS` of a row. Raises `TaskError` for invalid columns."""
    tool_list, arguments = _parse_column(row.get(tools)) if tools else None, _parse_column(row.get(ARGUMENTS))
    if not tool_list and not arguments:
        return base
    try:
        if isinstance(tool_list, list):
            tool_list = [_parse_column(item) for item in cast("list[object]", tool_list)]
        row_tools = msgspec.convert(_without_nulls(tool_list or []), tuple[dict[str, object], ...])
        more = msgspec.convert(_without_nulls(arguments or {}), dict[str, object])
        msgspec.msgpack.encode((row_tools, more))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        raise TaskError(
            f"{where}: the column {tools!r} must be a list of JSON schemas, and {ARGUMENTS!r} must have the chat "
            f'template\'s arguments by name: {error}. Name another column as `tools`, or none: tools = ""'
        ) from error
    return Template(
        arguments={**base.arguments, **more}, tools=(*base.tools, *row_tools), control_tokens=base.control_tokens
    )


def _text(content: object, where: str) -> object:
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in cast("list[object]", content):
        match part:
            case str(text):
                texts.append(text)
            case {"type": str(kind), "text": str(text)} if kind in PARTS:
                texts.append(text)
            case {"type": str(kind)} if kind not in PARTS:
                raise TaskError(f"{where}: a message has a part of the type {kind!r}, and the policy reads only text")
            case _:
                raise TaskError(
                    f"{where}: a part of a message has the texts `type` and `text`, this is {part!r:.{QUOTED}}"
                )
    return "".join(texts)


def _read_arguments(call: object) -> object:
    """Parse the arguments of a call, which OpenAI writes as JSON: a template would encode the JSON a second time."""
    match call := _parse_column(call):
        case {"function": {"arguments": str(text)}}:
            known = cast("dict[str, dict[str, object]]", call)
            arguments = _parse_column(text) if text.strip() else {}
            is_object = isinstance(arguments, dict)
            return {**known, "function": {**known["function"], "arguments": arguments}} if is_object else call
        case _:
            return call


def _parse_column(value: object) -> object:
    """Return the parsed value if `value` is JSON, as in tables with a fixed schema, and otherwise `value`."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: object) -> object:
    """Remove nulls at any depth: tables fill missing fields of a row with nulls."""
    match value:
        case Mapping():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list() | tuple():
            return [_without_nulls(item) for item in value]
        case _:
            return value
