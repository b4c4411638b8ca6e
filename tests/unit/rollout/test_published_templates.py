"""Sessions of two and more turns with tools, under the templates that model families publish.

The oracle is transformers: the tokens behind a turn are the end of the rendered conversation.
"""

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import published_templates
import pytest
from agent_case import Case, served
from jinja2 import TemplateError, UndefinedError

from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Message, Template

TOOL = {
    "type": "function",
    "function": {
        "name": "sum",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "One."}},
            "required": ["a"],
        },
    },
}
CALL = '<tool_call>\n{"name": "sum", "arguments": {"a": 1}}\n</tool_call>'
SHIPPED = published_templates.shipped()
FILES = sorted((Path(published_templates.__file__).parent / "templates").glob("*.jinja"))
# That of GLM puts its tokens together from roles, so no tokenizer can be made from it: SHORT has another.
WRITTEN = [path for path in FILES if path.stem != "glm"]
TEMPLATES = [
    *(pytest.param(path.read_text(), id=f"rules-{path.stem}") for path in WRITTEN),
    *(pytest.param(text, id=name) for name, text in published_templates.SHORT.items()),
    *(pytest.param(path.read_text(), id=f"trl-{name}") for name, path in SHIPPED.items()),
]
NO_TOOLS = {
    **dict.fromkeys(
        ("trl-cohere", "trl-gemma", "trl-gemma3"), "the chat template refuses the messages: Conversation roles"
    ),
    **dict.fromkeys(("rules-gemma2", "rules-gemma3", "rules-mistral"), "the chat template refuses the messages: "),
    **dict.fromkeys(
        ("phi", "rules-phi", "trl-cohere2", "trl-phi3", "trl-phi3_5"), "leaves out a message of the role 'tool'"
    ),
    "trl-deepseek_r1_distill": "",
    "trl-llava_next": "the chat template refuses the messages: Only user and assistant roles",
}
"""Families whose templates know no tools, and the sentence of a session that has some."""
LISTS = {"trl-idefics3", "trl-smolvlm", "trl-llava_next"}
"""Families whose templates take no text, only lists of parts."""


class Played(NamedTuple):
    """A conversation and its refusal, if any, with the row's text and its sampled part."""

    messages: list[dict[str, Any]]
    refusal: str
    row: str
    observations: list[str]
    sampled: str
    branches: int


async def ask(case: Case, messages: list[dict[str, Any]], tools: list[Any]) -> tuple[dict[str, Any] | None, str]:
    async with httpx.AsyncClient(verify=False, trust_env=False) as client:
        body = {"model": "any", "messages": messages, **({"tools": tools} if tools else {})}
        headers = {"Authorization": f"Bearer {case.key}"}
        answer = await client.post(f"{case.base_url}/chat/completions", json=body, headers=headers, timeout=60)
    if answer.status_code != 200:
        return None, f"{answer.status_code}: {answer.json()['error']['message']}"
    return answer.json()["choices"][0]["message"], ""


def played(
    template: str, folder: Path, *said: str, edits: bool = False, thinks: bool = False
) -> tuple[Tokenizer, Played]:
    """Play turns: a call is answered by "seven", another by "more"; the last request may be of an edited history."""
    tokenizer = published_templates.tokenizer(template, folder)
    tools = [TOOL] if CALL in said else []
    left = list(said)

    def say(text: str) -> str:
        if thinks:
            return f"{'' if text.rstrip().endswith('<think>') else '<think>'}hm</think>{left.pop(0)}"
        return ("\n</think>\n\n" if text.rstrip().endswith("<think>") else "") + left.pop(0)

    async def main() -> Played:
        unwritten = tokenizer.chat.leaves_out_tools((Message(role="user", content="?"),), Template(tools=(TOOL,)))
        async with served(tokenizer, say, ignored=("tools",) if unwritten else ()) as case:
            messages, refusal = [{"role": "user", "content": "1+2"}], ""
            while left:
                asked = [{"role": "user", "content": "edited"}, *messages[1:]] if edits and len(left) == 1 else messages
                answer, refusal = await ask(case, asked, tools)
                if answer is None:
                    break
                messages.append({name: value for name, value in answer.items() if value is not None})
                calls = answer.get("tool_calls")
                reply = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "seven"} if calls else {}
                messages.append(reply or {"role": "user", "content": "more"})
            turns = case.session.turns
            columns = case.session.row.columns([turn.number for turn in turns])
            spans, text = list[str](), tokenizer.spell(columns.tokens.tolist())
            masks = columns.mask.tolist()
            starts = [at for at in range(1, len(masks)) if masks[at - 1] and not masks[at]]
            for start in starts:
                end = next((at for at in range(start, len(masks)) if masks[at]), len(masks))
                spans.append(tokenizer.spell(columns.tokens[start:end].tolist()))
            sampled = tokenizer.spell(columns.tokens[columns.mask].tolist())
            assert int(columns.mask.sum()) == sum(turn.tokens for turn in turns)
            return Played(messages, refusal, text, spans, sampled, len(columns.branches))

    return tokenizer, asyncio.run(main())


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message.get("content", "")}]}


def rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[Any]) -> str:
    """What transformers renders for a conversation, with arguments as templates take them: as values, or as JSON."""
    with suppress(TypeError, UndefinedError, TemplateError):
        return rendered_as_values(tokenizer, messages, tools)
    chat = [{"content": "", **one} for one in messages]
    return str(tokenizer.hf.apply_chat_template(chat, tools=tools or None, add_generation_prompt=True, tokenize=False))


def rendered_as_values(tokenizer: Tokenizer, messages: list[dict[str, Any]], tools: list[Any]) -> str:
    chat = json.loads(json.dumps(messages))
    for call in (call for one in chat for call in one.get("tool_calls") or []):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    chat = [{"content": "", **one} for one in chat]
    return str(tokenizer.hf.apply_chat_template(chat, tools=tools or None, add_generation_prompt=True, tokenize=False))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", TEMPLATES)
def test_each_sampled_token_is_stored_once_and_what_follows_a_turn_is_the_end_of_what_transformers_renders(
    template: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tokenizer, found = played(template, tmp_path, "one", "two", "three")
    assert not found.refusal and not found.branches
    assert [found.sampled.count(one) for one in ("one", "two", "three")] == [1, 1, 1]
    lists = request.node.callspec.id in LISTS
    for turn, observed in enumerate(found.observations, 1):
        said = [in_parts(one) if lists else one for one in found.messages[: 2 * turn + 1]]
        assert rendered(tokenizer, said, []).endswith(observed) and "more" in observed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_answer_of_a_tool_follows_its_call_as_transformers_renders_it_or_is_refused_with_a_sentence(
    template: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    tokenizer, found = played(template, tmp_path, CALL, "it is five", "four")
    if NO_TOOLS.get(name):
        assert found.refusal.startswith("400: ") and NO_TOOLS[name] in found.refusal
        return
    assert not found.refusal and not found.branches
    assert [found.sampled.count(one) for one in ('"name": "sum"', "it is five", "four")] == [1, 1, 1]
    first, second = found.observations
    assert "seven" in first and "more" in second and "sum(" not in first
    # The end that the policy has sampled is not written again. TRL's template of R1 writes a second, empty turn.
    end = tokenizer.turn_end()
    if end is not None and name != "trl-deepseek_r1_distill":
        assert tokenizer.name(end) not in first.partition("seven")[0]
    said = [in_parts(one) if name in LISTS else one for one in found.messages]
    assert rendered(tokenizer, said[:3], [TOOL]).endswith(first)
    assert rendered(tokenizer, said[:5], [TOOL]).endswith(second)


@pytest.mark.parametrize("name", [name for name in published_templates.SHORT if name not in NO_TOOLS])
def test_the_answer_of_a_second_call_follows_it_as_transformers_renders_it(name: str, tmp_path: Path) -> None:
    again = CALL.replace("1", "2")
    tokenizer, found = played(published_templates.SHORT[name], tmp_path, CALL, "it is five", again, "four")
    assert not found.refusal and not found.branches and len(found.observations) == 3
    for count, observed in zip((3, 5, 7), found.observations, strict=True):
        assert rendered(tokenizer, found.messages[:count], [TOOL]).endswith(observed)
    first, _, third = found.observations
    numbered = {"command": ('"tool_call_id": 0', '"tool_call_id": 1'), "deepseek-r1": ("outputs", "\n")}
    before, after = numbered.get(name, ("seven", "seven"))
    assert before in first and after in third


@pytest.mark.sampled(3)
@pytest.mark.parametrize("template", TEMPLATES)
def test_reasoning_that_comes_back_stays_as_it_was_sampled_whatever_the_template_makes_of_it(
    template: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _, found = played(template, tmp_path, "one", "two", "three", thinks=True)
    assert not found.refusal and not found.branches
    said = [one for one in found.messages if one["role"] == "assistant"]
    assert [(one["reasoning_content"], one["content"]) for one in said] == [
        ("hm", "one"),
        ("hm", "two"),
        ("hm", "three"),
    ]
    assert found.sampled.count("hm</think>") == 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("template", TEMPLATES)
def test_an_edited_history_is_a_new_branch_and_no_sampled_token_is_stored_twice(
    template: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    _, found = played(template, tmp_path, "one", "two", "three", edits=True)
    assert not found.refusal and found.branches
    assert [found.sampled.count(one) for one in ("one", "two", "three")] == [1, 1, 1]
    assert "edited" in found.row
