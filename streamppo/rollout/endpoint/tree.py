"""The messages of one agent's run as a tree, and their places in the row of tokens. Pure.

A node is a message that follows its parent. A node may have two places in the row of tokens:

    opened    the last token of a context that ends with it: the template's opening of the next turn
    ended     its last sampled token, if it is an answer of the policy

    system, user          opened 20          request 1
      assistant "a"       ended 25           its answer
        tool "4"          opened 33          request 2 brings all four messages: the first three are tokens 0 .. 25
          assistant "b"   ended 36

A message of a request matches an equal node. An answer also matches the node with its id, or with the id of one of its
tool calls, even if its text was changed. The request continues the deepest matched answer, and the messages after that
answer are new. A request without a matched answer, or with other tools, begins a new root.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, cast

import msgspec

from streamppo.rollout.endpoint import json_values
from streamppo.types import Message

ROOT = -1
"""The node above all first messages."""
NO_PLACE = -1
"""The place before the first token."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Fields of an assistant's message that hold its reasoning, which many programs leave out."""


class TreePlace(NamedTuple):
    """The stored prefix of a request, up to message `node` and token `at`, and the `new_messages` after it."""

    node: int
    at: int
    new_messages: Sequence[Message]


class _Node(NamedTuple):
    parent: int
    key: bytes
    reasoning: str = ""


class Tree:
    """The tree of messages; `add` adds a turn. A `setting` holds the other inputs of a context, such as tools."""

    def __init__(self) -> None:
        self._nodes: list[_Node] = []
        self._children: dict[tuple[int, bytes], list[int]] = {}
        self._names: dict[str, int] = {}
        self._opened: dict[int, int] = {}
        self._ended: dict[int, int] = {}

    def match(self, messages: Sequence[Message], setting: object = ()) -> TreePlace:
        """Find the longest stored prefix of a request's messages; if several are equally long, the newest."""
        best, frontier = TreePlace(ROOT, NO_PLACE, messages), [ROOT]
        for count, message in enumerate(messages, 1):
            frontier = self._matches(frontier, message, _hash(setting) if count == 1 else b"")
            if not frontier:
                break
            places, new_messages = (self._ended, messages[count:]) if count < len(messages) else (self._opened, ())
            if known := [node for node in frontier if node in places]:
                best = TreePlace(known[-1], places[known[-1]], new_messages)
        return best

    def add(
        self,
        messages: Sequence[Message],
        answer: Message,
        setting: object = (),
        *,
        after: TreePlace,
        opened: int,
        ended: int,
        names: Iterable[str] = (),
        also: Iterable[Message] = (),
    ) -> int:
        """Add the turn that answered `messages`, which are stored up to `after`; return the turn's node.

        The turn's context ends at place `opened`, and its last token is at place `ended`. `names` are its ids. `also`
        are other forms in which a program may send the answer back.
        """
        node, begin = after.node, len(messages) - len(after.new_messages)
        for count, message in enumerate(after.new_messages, begin + 1):
            first = _hash(setting) if count == 1 else b""
            equal = self._matches([node], message, first)
            node = equal[-1] if equal else self._add_node(node, first + digest(message), message)
        self._opened.setdefault(node, opened)
        reply_node = self._add_node(node, digest(answer), answer)
        for other in also:
            self._children.setdefault((node, digest(other)), []).append(reply_node)
        self._ended[reply_node] = ended
        self._names.update(dict.fromkeys(names, reply_node))
        return reply_node

    def _matches(self, frontier: Sequence[int], message: Message, first: bytes) -> list[int]:
        key, reasoning = first + digest(message), _reasoning(message)
        known = {self._names[name] for name in ids(message) if name in self._names}
        by_name = [node for node in known if self._nodes[node].parent in frontier]
        if by_name:
            return by_name
        equal = sorted(node for parent in frontier for node in self._children.get((parent, key), ()))
        return [node for node in equal if not (reasoning and self._nodes[node].reasoning not in ("", reasoning))]

    def _add_node(self, parent: int, key: bytes, message: Message) -> int:
        self._nodes.append(_Node(parent, key, _reasoning(message)))
        node = len(self._nodes) - 1
        self._children.setdefault((parent, key), []).append(node)
        return node


def ids(message: Message) -> list[str]:
    """Return the ids of an assistant's message: those of its tool calls, and its own."""
    if message.role != "assistant":
        return []
    call_ids = [call.get("id") for call in message.tool_calls] + [message.fields.get("id")]
    return [name for name in call_ids if isinstance(name, str) and name]


def digest(message: Message) -> bytes:
    """Hash a message by its content. Of an assistant's message, only stripped text and calls count."""
    fields: dict[str, object] = {"role": message.role}
    if message.role == "assistant":
        fields |= {"content": message.text.strip(), "calls": [_call(call) for call in message.tool_calls]}
    else:
        common_fields = {"content": message.text, "name": message.name, "call": message.tool_call_id}
        fields |= {**message.fields, **common_fields, "calls": [dict(call) for call in message.tool_calls]}
    present = {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}
    return _hash(present)


def _call(call: Mapping[str, object]) -> object:
    function = call.get("function")
    called = cast("Mapping[str, object]", function if isinstance(function, Mapping) else call)
    return {"name": called.get("name"), "arguments": _value(called.get("arguments")) or {}}


def _value(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json_values.read(arguments) if arguments.strip() else None
    except ValueError:
        return arguments


def _reasoning(message: Message) -> str:
    texts = (message.fields.get(name) for name in THOUGHTS)
    return next((text.strip() for text in texts if isinstance(text, str) and text.strip()), "")


def _hash(value: object) -> bytes:
    return hashlib.blake2b(msgspec.json.encode(value, order="deterministic"), digest_size=16).digest()
