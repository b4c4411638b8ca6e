"""Requests that go wrong: each has its sentence, status and counter, and touches no other run."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import agent_case
import httpx
import numpy as np
import pytest
from agent_case import Case, served

from streamppo.errors import EnvironmentFailed, ModelError, RunError
from streamppo.rollout.endpoint import server, session
from streamppo.rollout.endpoint.server import Endpoint
from streamppo.tasks.tokenizer import Tokenizer

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
ASKED = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "a"}]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(tokenizer: Tokenizer, test: Callable[[Case, httpx.AsyncClient], Awaitable[None]], **options: Any) -> None:
    async def main() -> None:
        async with served(tokenizer, **options) as case:
            headers = {"Authorization": f"Bearer {case.key}"}
            limits = httpx.Limits(max_connections=2000)
            async with httpx.AsyncClient(
                verify=False,
                base_url=case.endpoint.address,
                headers=headers,
                trust_env=False,
                timeout=60,
                limits=limits,
            ) as client:
                await test(case, client)

    asyncio.run(main())


def sentence(answer: httpx.Response, path: str = CHAT) -> str:
    """The sentence of an error, in the form of its dialect."""
    error = answer.json()["error"]
    assert answer.json().get("type") == ("error" if path == MESSAGES else None)
    assert set(error) == ({"type", "message"} if path == MESSAGES else {"type", "message", "param", "code"})
    return error["message"]


BROKEN: dict[str, tuple[Any, str, str]] = {
    "no JSON": ("{", "the body is not JSON: ", "broken JSON"),
    "no UTF-8": (b"\xff\xfe{", "the body is not JSON: ", "broken JSON"),
    "a deep JSON": ("[" * 100_000, "the body is not JSON", "broken JSON"),
    "a list": ("[]", "the body is not a JSON object", "broken JSON"),
    "no messages": ({}, "messages is a list of objects", "unusable request"),
    "no message": ({"messages": []}, "messages is empty", "unusable request"),
    "messages that are texts": ({"messages": ["a"]}, "messages is a list of objects", "unusable request"),
    "a role of nobody": ({"messages": [{"role": "king", "content": "a"}]}, "a message's role is", "unusable request"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "the content of a message of the user is only text, and this has a part of the type 'image_url'",
        "unusable request",
    ),
    "no tokens": ({**ASKED, "max_tokens": 0}, "max_tokens is a number of tokens above 0, not 0", "unusable request"),
    "a text of tokens": ({**ASKED, "max_tokens": "9"}, "max_tokens is a number of tokens", "unusable request"),
    "a stop of nobody": ({**ASKED, "stop": [""], "stop_sequences": [""]}, " is a list of strings", "unusable request"),
    "a tool of nobody": ({**ASKED, "tools": [{}]}, "a tool ", "unusable request"),
    "half of a character": (
        '{"max_tokens": 9, "messages": [{"role": "user", "content": "\\ud83d"}]}',
        "the body is not JSON: ",
        "broken JSON",
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("name", BROKEN)
def test_a_request_that_cannot_be_read_has_its_sentence_and_its_counter(
    name: str, path: str, tokenizer: Tokenizer
) -> None:
    body, said, counter = BROKEN[name]

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(path, content=body if isinstance(body, str | bytes) else json.dumps(body))
        assert answer.status_code == 400 and said in sentence(answer, path)
        assert case.counts[counter] == 1 and not case.engine.asked
        assert (await client.post(path, json=ASKED)).status_code == 200

    run(tokenizer, test)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"input": 5}, "input is a list of objects"),
        ({"input": []}, "input is empty"),
        ({"input": [{"type": "computer_call"}]}, "an item of the input is a message, a function call or its output"),
        ({"input": "a", "background": True}, "background is not possible here"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "format is not possible here"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "a tool is a function, not 'web_search'"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens is a number of tokens above 0"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "a tool call has no name"),
    ],
)
def test_a_request_for_a_response_that_cannot_be_answered_is_refused(
    body: dict[str, Any], said: str, tokenizer: Tokenizer
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 400 and said in sentence(answer) and not case.engine.asked

    run(tokenizer, test)


@pytest.mark.parametrize(
    "parameter",
    [
        {"best_of": 2},
        {"n": 2, "stream": True},
        {"top_logprobs": 2},
        {"logit_bias": {"5": 100}},
        {"response_format": {"type": "json_schema"}},
        {"tool_choice": {"type": "function", "function": {"name": "f"}}},
    ],
)
def test_parameters_that_would_change_what_is_trained_are_refused(
    parameter: dict[str, Any], tokenizer: Tokenizer
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json={**ASKED, **parameter})
        assert answer.status_code == 400 and sentence(answer).startswith(f"{next(iter(parameter))} is not possible")
        assert case.counts["unusable parameter"] == 1

    run(tokenizer, test)


@pytest.mark.parametrize("key", ["sp-1-x", "sp-99-x", "nothing", "sp-1-\N{SNOWMAN}", "Bearer"])
def test_a_key_of_no_run_is_refused(key: str, tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        for headers in ({"x-api-key": key.encode()}, {"Authorization": f"Bearer {key}".encode()}):
            client.headers.pop("Authorization", None)
            answer = await client.post(MESSAGES, json=ASKED, headers=headers)
            assert (answer.status_code, sentence(answer, MESSAGES)) == (401, "no run has this key")
        assert case.counts["unknown key"] == 2

    run(tokenizer, test)


def test_a_key_opens_its_own_run_alone_and_none_when_that_has_ended(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "REMEMBERED", 1)

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        other = case.opened()
        await client.post(CHAT, json=ASKED)
        assert len(case.session.turns) == 1 and not other.turns
        case.endpoint.close(case.session)
        assert (await client.post(CHAT, json=ASKED)).status_code == 410
        case.endpoint.close(other)
        # Of many runs that have ended the last ones are remembered.
        assert (await client.post(CHAT, json=ASKED)).status_code == 401

    run(tokenizer, test)


def test_too_large_a_body_is_refused_before_it_is_read(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "BODY_BYTES", 2**20)

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, content=b" " * (2**20 + 1))
        assert (answer.status_code, sentence(answer)) == (413, "a request has at most 1 MiB")
        assert case.counts["too large a body"] == 1

    run(tokenizer, test)


def test_another_hosts_name_is_refused_on_loopback(tokenizer: Tokenizer) -> None:
    """A page of a browser that a name of its own leads here (DNS rebinding)."""

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        for host, status in {"evil.example": 403, "localhost:80": 200, "[::1]:99": 200, "127.0.0.1.evil": 403}.items():
            answer = await client.get("/v1/models", headers={"Host": host})
            assert answer.status_code == status, host
        assert case.counts["another host's name"] == 2

    run(tokenizer, test)


def test_an_endpoint_elsewhere_answers_under_every_name_and_still_asks_for_the_key(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        assert (await client.get("/v1/models", headers={"Host": "a.cluster"})).status_code == 200
        assert (await client.get("/v1/models", headers={"Authorization": ""})).status_code == 401

    run(tokenizer, test, host="0.0.0.0")


def test_an_address_of_another_machine_stops_the_run() -> None:
    with pytest.raises(RunError, match=r"environment\.host = '192\.0\.2\.1' is not an address of this machine"):
        asyncio.run(Endpoint("192.0.2.1").start())


def test_a_thousand_requests_at_once_in_one_run_are_answered_up_to_its_bounds(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        other = case.opened()
        case.engine.gate.clear()
        asking = [asyncio.create_task(plainly(case)) for _ in range(1000)]
        while case.counts.get("requests", 0) < 1000:
            await asyncio.sleep(0.01)
        # Another run is answered meanwhile.
        case.engine.gate.set()
        answer = await client.post(CHAT, json=ASKED, headers={"Authorization": f"Bearer {other.key}"})
        assert answer.status_code == 200
        statuses = [await one for one in asking]
        assert statuses.count(200) == 40 and statuses.count(400) == 960
        assert case.counts["over budget"] == 960
        assert len(case.session.turns) == 40 and case.session.row.length <= 4096

    run(tokenizer, test, max_turns=40)


def test_more_at_once_than_a_run_may_have_under_way_are_asked_to_wait(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "MOST_UNDER_WAY", 2)

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        case.engine.gate.clear()
        asking = [asyncio.create_task(client.post(CHAT, json=ASKED)) for _ in range(3)]
        while case.counts.get("requests", 0) < 3:
            await asyncio.sleep(0.01)
        case.engine.gate.set()
        assert sorted([(await one).status_code for one in asking]) == [200, 200, 429]
        assert case.counts["too many at once"] == 1

    run(tokenizer, test)


def test_requests_side_by_side_wait_for_room_in_the_row(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answers = await asyncio.gather(*(client.post(CHAT, json=ASKED) for _ in range(6)))
        assert {one.status_code for one in answers} == {200}
        assert case.session.row.length <= 60 and not case.session.refused

    run(tokenizer, test, max_tokens=60)


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_whose_client_hangs_up_goes_on_and_the_same_request_joins_it(stream: bool, tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        asked = {**ASKED, "stream": stream}
        for ended_before in (False, True):
            case.engine.gate.clear()
            with pytest.raises(httpx.ReadTimeout):
                await client.post(CHAT, json=asked, timeout=0.3)
            await until(partial(has_counted, case, "disconnected", 1 + ended_before))
            if ended_before:
                case.engine.gate.set()
                await until(lambda: len(case.session.turns) == 2)
                assert case.session.undelivered == 3
            asking = asyncio.create_task(client.post(CHAT, json=asked))
            await until(partial(has_counted, case, "joined", 1 + ended_before))
            case.engine.gate.set()
            answer = await asking
            assert answer.status_code == 200 and "hi" in answer.text
        # The second round's request is a sibling of the first, which was received.
        assert len(case.engine.asked) == 2 and case.session.undelivered == 0

    run(tokenizer, test)


def test_what_nobody_received_is_masked_and_counted(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        case.engine.gate.clear()
        with pytest.raises(httpx.ReadTimeout):
            await client.post(CHAT, json=ASKED, timeout=0.3)
        case.engine.gate.set()
        await until(lambda: bool(case.session.turns))
        with pytest.raises(EnvironmentFailed, match="received no answer") as failed:
            case.session.received_turns()
        assert failed.value.tokens == 3
        await client.post(CHAT, json={**ASKED, "max_tokens": 19})
        (turn,) = case.session.received_turns()
        columns = case.session.row.columns([turn.number])
        assert turn.number == 2 and columns.mask.sum() == 3 and (columns.logprobs[~columns.mask] == 0).all()
        assert case.session.undelivered == 3
        assert case.session.sampled == int(columns.mask.sum()) + case.session.undelivered

    run(tokenizer, test)


def test_a_stream_that_waits_gives_signs_of_life(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.05)

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        for path, sign in ((CHAT, ": keep-alive"), (MESSAGES, "event: ping")):
            case.engine.gate.clear()
            asyncio.get_running_loop().call_later(0.4, case.engine.gate.set)
            answer = await client.post(path, json={**ASKED, "stream": True})
            assert answer.text.count(sign) >= 3

    run(tokenizer, test)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_run_cuts_off_what_is_under_way(stream: bool, tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        case.engine.gate.clear()
        asking = asyncio.create_task(client.post(CHAT, json={**ASKED, "stream": stream}))
        await until(lambda: case.engine.under_way == 1)
        await asyncio.sleep(0.05)
        case.endpoint.close(case.session)
        answer = await asking
        assert "the run of this key has ended" in answer.text
        assert case.engine.under_way == 0 and case.counts["cut off at the end"] == 1

    run(tokenizer, test)


@pytest.mark.parametrize("kind", [RuntimeError, ModelError])
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stop": ["x"]}])
def test_an_engine_that_fails_fails_the_run_with_its_reason(
    more: dict[str, Any], kind: type[Exception], tokenizer: Tokenizer
) -> None:
    def fail(_: str) -> str:
        raise kind("out of memory")

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        answer = await client.post(CHAT, json={**ASKED, **more})
        assert f"the engine failed: {kind.__name__}: out of memory" in answer.text
        with pytest.raises(EnvironmentFailed, match="out of memory"):
            case.session.received_turns()
        assert not case.session.refused

    run(tokenizer, test, say=fail)


def test_a_turn_that_is_cut_off_says_so_and_the_agent_may_go_on(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        first = (await client.post(CHAT, json={**ASKED, "max_tokens": 1})).json()["choices"][0]
        assert (first["finish_reason"], first["message"]["content"]) == ("length", "h")
        more = [*ASKED["messages"], first["message"], {"role": "user", "content": "b"}]  # pyright: ignore
        assert (await client.post(CHAT, json={**ASKED, "messages": more})).status_code == 200
        assert case.row() == "[user]a<eos>[assistant]h<eos>[user]b<eos>[assistant]hi<eos>"
        assert not case.session.refused

    run(tokenizer, test)


def test_the_engine_sees_the_tokens_of_the_row_byte_for_byte(tokenizer: Tokenizer) -> None:
    """Sub-agents, edits and repeats; each context that the engine saw is a path of the row."""

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        async def ask(*texts: str) -> None:
            roles = ("user", "assistant")
            messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
            assert (await client.post(CHAT, json={**ASKED, "messages": messages})).status_code == 200

        await ask("a")
        await asyncio.gather(ask("a", "hi", "b"), ask("a", "hi", "c"), ask("sub"), ask("a"), ask("a", "hi", "b"))
        await asyncio.gather(ask("a", "hi", "b", "hi", "d"), ask("sub", "hi", "e"), ask("a", "edited", "b"))
        row = case.session.row
        ends = np.flatnonzero(np.diff(row._turn, append=0) != 0)
        paths = [row.context(int(end)).tolist() for end in ends if row._turn[end]]
        # Behind each context its answer follows, once.
        assert sorted([*asked, *tokens("hi")] for asked in case.engine.asked) == sorted(paths)
        assert len(paths) == 9 and row.columns(range(1, 10)).mask.sum() == 27

    def tokens(text: str) -> list[int]:
        from streamppo.types import Prompt

        return [*tokenizer.ids(Prompt(text=text, columns={})), 1]

    run(tokenizer, test, max_turns=20)


def test_messages_that_the_template_refuses_are_told(tmp_path: Path) -> None:
    template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('users begin') }}{% endif %}" + agent_case.TEMPLATE
    )

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        asked = {**ASKED, "messages": [{"role": "tool", "content": "a"}]}
        assert "users begin" in sentence(await client.post(CHAT, json=asked))

    run(agent_case.tokenizer(tmp_path, template), test)


async def plainly(case: Case) -> int:
    """Ask without a client, which would spend most of the time; the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(case.endpoint.address.rpartition(":")[2]))
    body = json.dumps(ASKED).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {case.key}\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    answer = await reader.read()
    writer.close()
    return int(answer.split()[1])


def has_counted(case: Case, reason: str, count: int) -> bool:
    return case.counts.get(reason) == count


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)
