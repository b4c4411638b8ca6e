"""Bodies and addresses as programs in the field send them: each is answered, or refused in the form of its dialect."""

import asyncio
import copy
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import agent_case
import httpx
import pytest
from agent_case import Case, Speaks, served

from streamppo.config.task import AgentEnvironment
from streamppo.rollout.endpoint import json_values
from streamppo.rollout.endpoint.dialects import wire
from streamppo.rollout.endpoint.dialects.chat import Chat
from streamppo.rollout.endpoint.dialects.messages import Messages
from streamppo.rollout.endpoint.dialects.responses import Responses
from streamppo.rollout.endpoint.dialects.wire import Dialect
from streamppo.rollout.endpoint.request import RequestRefused
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import ContextReuse, Sampling
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
WHOLE: dict[str, dict[str, Any]] = {
    CHAT: {
        "model": "m",
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"},
            {
                "role": "assistant",
                "content": "x",
                "reasoning_content": "t",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "3"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": SCHEMA}}],
        "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"a": 1},
        "tool_choice": "auto",
    },
    MESSAGES: {
        "model": "m",
        "max_tokens": 9,
        "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "t", "signature": ""},
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "3"}]}],
            },
        ],
        "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "high"},
    },
    RESPONSES: {
        "model": "m",
        "max_output_tokens": 9,
        "instructions": "s",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "t"}]},
            {
                "type": "message",
                "role": "assistant",
                "id": "m1",
                "content": [{"type": "output_text", "text": "x"}],
            },
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "3"},
        ],
        "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
    },
}
DIALECTS: dict[str, Dialect] = {CHAT: Chat(), MESSAGES: Messages(), RESPONSES: Responses()}
ODD: list[Any] = [
    *(None, "", "x", True, 0, -1, 1.5, 10**30, -(10**400), 1e308),
    *([], {}, [[]], [None], ["a"], [1], {"a": 1}, {"a": [10**30]}),
    *([{"type": "text"}], [{"type": "text", "text": None}], [{"type": []}], [{"type": {}}]),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(tokenizer: Tokenizer, test: Callable[[Case, httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with (
            served(tokenizer, **options) as case,
            httpx.AsyncClient(
                verify=False,
                base_url=case.endpoint.address,
                headers={"Authorization": f"Bearer {case.key}"},
                trust_env=False,
                timeout=60,
            ) as client,
        ):
            await test(case, client)

    asyncio.run(main())


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of all values in a body."""
    if place:
        yield place
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from places(value[name], (*place, name))


def changed(body: dict[str, Any], place: tuple[Any, ...], value: Any) -> Any:
    made = copy.deepcopy(body)
    inner: Any = made
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = value
    return made


@pytest.mark.parametrize("path", DIALECTS)
def test_whatever_stands_in_a_body_is_answered_or_refused_and_fails_no_run(path: str, tokenizer: Tokenizer) -> None:
    """Every value of a whole body becomes every odd one."""
    dialect = DIALECTS[path]
    policy = SampledPolicy(Speaks(tokenizer, lambda _: "hi"), tokenizer, Stop(), ContextReuse())

    async def main() -> Counter[str]:
        found = Counter[str]()
        for place in places(WHOLE[path]):
            for value in ODD:
                session = Session("k", policy, Sampling(50), AgentEnvironment(agent="a:b"), counts=Counter())
                body = changed(WHOLE[path], place, value)
                try:
                    turn = session.begin(dialect.read(json_values.plain(body)))  # pyright: ignore
                except RequestRefused as error:
                    assert error.status == 400, body
                    found["refused"] += 1
                    continue
                assert turn.task is not None
                await turn.task
                assert not session.failure, (body, session.failure)
                found["refused" if turn.error else "answered"] += 1
                if turn.error is None:
                    json.dumps(dialect.complete([turn], "m"))
        return found

    found = asyncio.run(main())
    assert min(found.values()) > 100


NUMBERS = [f'{{"a": {10**30}}}', f'{{"a": -1{"0" * 400}}}', json.dumps('{"a": 1e999}'), json.dumps('{"a": "\\ud83d"}')]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("arguments", NUMBERS)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_call_of_the_policys_with_any_arguments_comes_back_and_fails_no_run(
    path: str, arguments: str, tokenizer: Tokenizer
) -> None:
    """Behind its own context, and in another one, where it is rendered anew."""
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        case.session._sampling = Sampling(2000)
        for first in ("a", "edited"):
            asked: dict[str, Any] = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": first}]}
            asked["tools"] = WHOLE[path]["tools"]
            if first == "a":
                made = (await client.post(path, json=asked)).json()
            if path == CHAT:
                said = made["choices"][0]["message"]
                result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "3"}
            else:
                said = {"role": "assistant", "content": made["content"]}
                block = {"type": "tool_result", "tool_use_id": made["content"][-1]["id"], "content": "3"}
                result = {"role": "user", "content": [block]}
            more = {**asked, "messages": [*asked["messages"], said, result]}
            answer = await client.post(path, content=json.dumps(more))
            assert answer.status_code == 200, answer.text
        assert not case.session.failure

    run(tokenizer, test, say=lambda text: call if "[tool]" not in text else "3", max_tokens=20_000)


@pytest.mark.parametrize("arguments", ['{"a": 1e999}', '{"a": NaN}', '{"a": "\\ud83d"}', f"{'[' * 200}{']' * 200}"])
def test_a_call_of_the_policys_that_not_every_program_can_read_stays_text(arguments: str, tokenizer: Tokenizer) -> None:
    call = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        case.session._sampling = Sampling(2000)
        asked = {"model": "m", "max_tokens": 2000, "messages": [{"role": "user", "content": "a"}]}
        for path in (CHAT, MESSAGES):
            answer = await client.post(path, json=asked)
            assert answer.status_code == 200 and json.dumps(call)[1:-1] in json.dumps(answer.json())

    run(tokenizer, test, say=lambda _: call, max_tokens=20_000)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("path", "parameter"),
    [
        *[(path, {"top_logprobs": 3}) for path in DIALECTS],
        (CHAT, {"functions": [{"name": "f"}]}),
        (CHAT, {"function_call": "auto"}),
        (CHAT, {"modalities": ["text", "audio"]}),
        (CHAT, {"web_search_options": {"a": 1}}),
        (CHAT, {"guided_regex": "a+"}),
        (CHAT, {"stop_token_ids": [5]}),
        (CHAT, {"best_of": 3}),
        (MESSAGES, {"tool_choice": {"type": "any"}}),
        (RESPONSES, {"tool_choice": {"type": "function", "name": "f"}}),
        (RESPONSES, {"tool_choice": "required"}),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
        (MESSAGES, {"output_format": {"type": "json_schema", "schema": {}}}),
        (MESSAGES, {"mcp_servers": [{"type": "url"}]}),
        (RESPONSES, {"prompt": {"id": "pmpt_1"}}),
        (RESPONSES, {"text": {"format": {"type": "json_schema"}}}),
    ],
)
def test_what_would_change_the_answer_is_refused_in_every_dialect(
    path: str, parameter: dict[str, Any], tokenizer: Tokenizer
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json={**WHOLE[path], **parameter})
        assert answer.status_code == 400 and " is not possible here: " in answer.json()["error"]["message"]
        assert case.counts["unusable parameter"] == 1 and not case.engine.asked

    run(tokenizer, test)


def test_what_the_run_chooses_is_left_out_and_counted(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        given = {"temperature": 0.1, "repetition_penalty": 1.1, "min_tokens": 3, "parallel_tool_calls": False}
        assert (await client.post(CHAT, json={**WHOLE[CHAT], **given})).status_code == 200
        assert case.counts["sampling parameters left out"] == 4
        assert (await client.post(CHAT, json={**WHOLE[CHAT], "parallel_tool_calls": True})).status_code == 200
        assert case.counts["sampling parameters left out"] == 4

    run(tokenizer, test)


@pytest.mark.parametrize("path", DIALECTS)
def test_what_the_endpoint_does_not_know_is_counted_and_logged_once(
    path: str, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        given = {"reasoning_effort": "high", "bad_words": ["x"], "echo": False, "user": "u", "metadata": {"a": "b"}}
        for _ in range(2):
            assert (await client.post(path, json={**WHOLE[path], **given})).status_code == 200
        assert case.counts["unknown parameters left out"] == 4
        assert [text for text in caplog.messages if "does not know it" in text] == [
            f"agents set {name}: it is ignored, because the endpoint does not know it"
            for name in ("reasoning_effort", "bad_words")
        ]

    caplog.set_level("INFO")
    run(tokenizer, test)


FORMS: list[tuple[str, dict[str, Any]]] = [
    *[(path, {name: {"type": "object"}}) for path in DIALECTS for name in wire.FORMATS],
    *[(path, {place: {"format": {"type": "json_object"}}}) for path in DIALECTS for place in wire.FORMATS_IN],
]
FORCED: list[tuple[str, dict[str, Any]]] = [
    *[(path, {"tool_choice": one}) for path in DIALECTS for one in ("required", {"type": "any"}, {"type": "tool"})],
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}),
]


@pytest.mark.sampled(8)
@pytest.mark.parametrize(
    ("name", "path", "parameter"),
    [*[("response_format", *one) for one in FORMS], *[("tool_choice", *one) for one in FORCED]],
)
def test_what_environment_ignored_names_is_left_out_and_counted_and_nothing_else(
    name: str, path: str, parameter: dict[str, Any], tokenizer: Tokenizer
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        assert (await client.post(path, json={**WHOLE[path], **parameter})).status_code == 200
        assert case.counts["ignored parameters left out"] == 1
        assert (await client.post(path, json={**WHOLE[path], "logit_bias": {"5": 1}})).status_code == 400

    async def refused(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json={**WHOLE[path], **parameter})
        assert answer.status_code == 400 and f'environment.ignored = ["{name}"]' in answer.json()["error"]["message"]

    run(tokenizer, test, ignored=(name,))
    run(tokenizer, refused, ignored=tuple({"response_format", "tool_choice"} - {name}))


@pytest.mark.parametrize("path", DIALECTS)
def test_tools_that_the_chat_template_leaves_out_are_refused_unless_environment_ignored_names_them(
    path: str, tmp_path: Path
) -> None:
    plain = agent_case.tokenizer(tmp_path, agent_case.TEMPLATE.replace("{% if tools %}", "{% if false %}"))

    async def refused(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, json=WHOLE[path])
        assert answer.status_code == 400 and "leaves out the tools" in answer.json()["error"]["message"]
        assert (await client.post(path, json={**WHOLE[path], "tools": []})).status_code == 200

    async def answered(case: Case, client: httpx.AsyncClient) -> None:
        assert (await client.post(path, json=WHOLE[path])).status_code == 200
        assert case.counts["ignored parameters left out"] == 1

    run(plain, refused)
    run(plain, answered, ignored=("tools",))


def test_a_body_that_is_nested_too_deeply_is_refused(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        deep: Any = 1
        for _ in range(200):
            deep = {"properties": deep}
        tool = {"type": "function", "function": {"name": "f", "parameters": deep}}
        answer = await client.post(CHAT, json={**WHOLE[CHAT], "tools": [tool]})
        assert answer.status_code == 400 and "nested deeper than 100 times" in answer.text
        assert case.counts["broken JSON"] == 1 and not case.session.failure

    run(tokenizer, test)


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/chat/completions", 404, "POST /chat/completions"),
        ("POST", "/v1/completions", 404, "POST /v1/completions"),
        ("POST", "/v1/v1/messages", 404, "POST /v1/v1/messages"),
        ("GET", "/v1/chat/completions", 405, "GET /v1/chat/completions"),
        ("DELETE", "/key/KEY/v1/responses/x", 404, "DELETE /v1/responses/x"),
    ],
)
def test_another_address_is_refused_with_those_that_there_are(
    method: str, path: str, status: int, said: str, tokenizer: Tokenizer
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.request(method, path.replace("KEY", case.key))
        assert answer.status_code == status and case.counts["another address"] == 1
        assert answer.json().get("type") == ("error" if "messages" in path else None)
        message = answer.json()["error"]["message"]
        assert message.startswith(f"the endpoint has no {said}: it has chat/completions, ") and "sp-" not in message

    run(tokenizer, test)


def test_a_fault_of_the_endpoint_is_told_in_the_form_of_the_dialect(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise KeyError("planted")

    monkeypatch.setattr(Messages, "read", broken)

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(MESSAGES, json=WHOLE[MESSAGES])
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "api_error"
        assert answer.json()["error"]["message"] == "the endpoint failed: KeyError: 'planted'"
        assert case.counts["endpoint failed"] == 1
        assert (await client.post(CHAT, json=WHOLE[CHAT])).status_code == 200

    run(tokenizer, test)
