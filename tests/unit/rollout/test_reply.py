"""A turn's text is read: reasoning, text, tool calls; a stream is a beginning of the whole."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_kinds
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.rollout.endpoint import reply
from streamppo.tasks.tokenizer import Tokenizer

CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "opened", "reasoning", "content", "calls"),
    [
        ("46", False, "", "46", []),
        (" 46\n", False, "", " 46\n", []),
        ("<think>hm</think>\n\n46", False, "hm", "46", []),
        ("\n<think>\nhm\n</think>46", False, "hm", "46", []),
        ("hm</think>46", True, "hm", "46", []),
        ("hm", True, "hm", "", []),
        ("<think>hm", False, "hm", "", []),
        (f"Let me see.\n{CALL}", False, "", "Let me see.", [("sum", {"a": 1})]),
        (f"<think>hm</think>{CALL}{CALL}", False, "hm", "", [("sum", {"a": 1}), ("sum", {"a": 1})]),
        ('<tool_call>{"name": "f", "parameters": {}}', False, "", "", [("f", {})]),
        ('<tool_call>{"function": {"name": "f", "arguments": {"b": 2}}}</tool_call>', False, "", "", [("f", {"b": 2})]),
        ('<tool_call>[{"name": "f"}, {"name": "g"}]</tool_call>', False, "", "", [("f", {}), ("g", {})]),
        ("<tool_call>{broken</tool_call>", False, "", "<tool_call>{broken</tool_call>", []),
        ('<tool_call>{"arguments": {}}</tool_call>', False, "", '<tool_call>{"arguments": {}}</tool_call>', []),
        ("<tool_call>" + "[" * 10_000, False, "", "<tool_call>" + "[" * 10_000, []),
    ],
)
def test_a_turn_is_read(text: str, opened: bool, reasoning: str, content: str, calls: list[Any]) -> None:
    found = reply.read(text, opened=opened)
    assert (found.reasoning, found.content) == (reasoning, content)
    assert [(one.name, json.loads(one.arguments)) for one in found.calls] == calls
    assert len({one.id for one in found.calls}) == len(calls)


PARTS = st.lists(st.sampled_from(["<think>", "</think>", "<tool_call>", CALL, "a", " b", "\n", "<", "{}", "<too"]))


@settings(max_examples=500, deadline=None)
@given(PARTS, st.booleans(), st.data())
def test_what_is_streamed_is_a_beginning_of_the_whole(parts: list[str], opened: bool, data: st.DataObject) -> None:
    """The reading of every beginning of a text is a beginning of the whole text's reading."""
    text = "".join(parts)
    begun = text[: data.draw(st.integers(0, len(text)))]
    shown, whole = reply.read_partial(begun, opened=opened), reply.read(text, opened=opened)
    assert whole.content.startswith(shown.content)
    assert whole.reasoning.startswith(shown.reasoning)


SCHEMA = {
    "type": "object",
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": "string", "x-regex": r"^(.*?)(?:\[call\]|$)"},
        "thinking": {"type": "string", "x-regex": r"\[thought\](.*?)\[/thought\]"},
        "tool_calls": {
            "x-regex-iterator": r"\[call\](.*?)\[/call\]",
            "type": "array",
            "items": {"x-parser": "json", "type": "object", "properties": {"type": {"const": "function"}}},
        },
    },
}
"""A turn as versions of transformers before 5.13 describe it."""
TEMPLATE = {
    "start_anchor": "assistant:",
    "fields": {
        "content": {},
        "thinking": {"open": "[thought]", "close": "[/thought]"},
        "tool_calls": {"open": "[call]", "close": "[/call]", "content": "json", "repeats": True},
    },
}
"""The same turn for later versions."""


def described(folder: Path) -> Tokenizer:
    """A tokenizer whose file describes turns in both ways, as transformers loads it."""
    tokenizer_kinds.make("byte_bpe", "qwen3").save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    both = {"response_schema": SCHEMA, "response_template": TEMPLATE}
    file.write_text(json.dumps({**json.loads(file.read_text()), **both}))
    return Tokenizer(folder)


def test_a_tokenizer_that_describes_turns_reads_them_in_place_of_the_marks(tmp_path: Path) -> None:
    tokenizer = described(tmp_path)
    parse = tokenizer.response_parser(tokenizer.hf.encode("[call] assistant:"))
    text = 'so[call]{"function": {"name": "f", "arguments": {"a": 1}}}[/call][thought]hm[/thought]'
    found = reply.read(text, parse=parse)
    assert (found.content, found.reasoning) == ("so", "hm")
    assert [(one.name, one.arguments) for one in found.calls] == [("f", '{"a": 1}')]
    # A turn that it does not fit is text.
    assert reply.read("a[call]{[/call]", parse=parse) == reply.Reply("a[call]{[/call]")


def test_a_turn_that_its_prompt_has_begun_is_read_with_that_beginning(tmp_path: Path) -> None:
    tokenizer = described(tmp_path)
    if not hasattr(tokenizer.hf, "response_template"):
        pytest.skip("this version of transformers parses a turn without its prompt")
    parse = tokenizer.response_parser(tokenizer.hf.encode("assistant:[thought]"))
    assert reply.read("hm[/thought]so", parse=parse) == reply.Reply("so", "hm")


def test_the_arguments_of_a_call_have_the_types_of_the_tool(tmp_path: Path) -> None:
    tokenizer = described(tmp_path)
    if "tools" not in inspect.signature(tokenizer.hf.parse_response).parameters:
        pytest.skip("this version of transformers reads arguments as they are written")
    types = {"a": {"type": "integer"}, "b": {"type": "string"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": types}}}
    parse = tokenizer.response_parser(tokenizer.hf.encode("assistant:"), (tool,))
    found = reply.read('[call]{"function": {"name": "f", "arguments": {"a": "1", "b": "1"}}}[/call]', parse=parse)
    assert [json.loads(one.arguments) for one in found.calls] == [{"a": 1, "b": "1"}]


def test_a_tokenizer_without_a_description_has_no_parser(tmp_path: Path) -> None:
    tokenizer_kinds.make("byte_bpe", "qwen3").save_pretrained(tmp_path)
    assert Tokenizer(tmp_path).response_parser() is None
