"""Messages, tools and template arguments as the rows of data sets write them: OpenAI's form, and transformers'."""

import json
from collections.abc import Mapping
from typing import cast

import msgspec

from streamppo.errors import TaskError
from streamppo.tasks.dataset_files import Row
from streamppo.types import Message, Template

ARGUMENTS = "chat_template_kwargs"
"""TRL's column of the arguments of the chat template."""


def message(item: object, where: str) -> Message:
    """Read one message with all its fields, those that are null left out. Raises `TaskError` if it is none."""
    match item:
        case {"role": str(role), **rest}:
            given = cast("dict[str, object]", _without_nulls(rest))
        case _:
            raise TaskError(f"{where}: a message has the texts `role` and `content`, this is {item!r}")
    content = given.pop("content", None)
    if not isinstance(content, str) and (content is not None or not given.get("tool_calls")):
        raise TaskError(f"{where}: a message has the texts `role` and `content`, this is {item!r}")
    known = {name: given.pop(name) for name in ("name", "tool_calls", "tool_call_id") if name in given}
    try:
        made = msgspec.convert({"role": role, "content": content, **known, "fields": given}, Message)
        # It crosses processes.
        msgspec.msgpack.encode(made)
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise TaskError(f"{where}: no message that a chat template gets: {error}: {item!r}") from error
    return made


def template(row: Row, tools: str, base: Template, where: str) -> Template:
    """Add to `base` the tools in the column `tools` of a row, and its `ARGUMENTS`. Raises `TaskError` for others."""
    listed, arguments = _parse_column(row.get(tools)) if tools else None, _parse_column(row.get(ARGUMENTS))
    if not listed and not arguments:
        return base
    try:
        given = msgspec.convert(_without_nulls(listed or []), tuple[dict[str, object], ...])
        more = msgspec.convert(_without_nulls(arguments or {}), dict[str, object])
        msgspec.msgpack.encode((given, more))
    except (msgspec.ValidationError, TypeError, OverflowError) as error:
        raise TaskError(
            f"{where}: the column {tools!r} is a list of JSON schemas and {ARGUMENTS!r} has arguments by name, for the "
            f'chat template; here {error}. Name another column, or none: tools = ""'
        ) from error
    return Template(
        arguments={**base.arguments, **more}, tools=(*base.tools, *given), control_tokens=base.control_tokens
    )


def _parse_column(value: object) -> object:
    """A column may hold JSON as a text: rows of one schema need that."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def _without_nulls(value: object) -> object:
    """Tables fill up what a row does not have with nulls, in structs too."""
    match value:
        case Mapping():
            return {key: _without_nulls(item) for key, item in value.items() if item is not None}
        case list() | tuple():
            return [_without_nulls(item) for item in value]
        case _:
            return value
