"""What a server answers: events become answers, and faults errors."""

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from fake_sglang import run

from streamppo.errors import ModelError, TaskError
from streamppo.rollout.sglang import checks, server
from streamppo.rollout.sglang.processes import ProcessOutput
from streamppo.rollout.sglang.server import ServerLink
from streamppo.tasks.rewards.client import Client

pytest_plugins = ["rollout_log"]
EVENT = b'data: {"meta_info": {"completion_tokens": %d}}\n\n'
INFO: dict[str, Any] = {"version": "0.5.21", "max_req_input_len": 506}


def served(*parts: bytes, status: int = 200, breaks: bool = False) -> ServerLink:
    """A server that answers every call by `parts` as they are cut."""

    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part
        if breaks:
            raise httpx.RemoteProtocolError("it hung up")

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/generate"
        return httpx.Response(status, content=body())

    client = httpx.AsyncClient(verify=False, transport=httpx.MockTransport(answer), base_url="http://localhost:1")
    return ServerLink(client, "http://localhost:1", 4, INFO)


async def counts(link: ServerLink, into: list[int]) -> None:
    async with aclosing(link.stream(rid="r", input_ids=[3])) as answers:
        async for answer in answers:
            into.append(answer["meta_info"]["completion_tokens"])


def test_events_become_answers_however_they_are_cut_into_packets() -> None:
    async def case() -> None:
        whole, found = EVENT % 1 + EVENT % 9 + b"data: [DONE]\n\n", list[int]()
        await counts(served(whole[:20], whole[20:60], whole[60:]), found)
        assert found == [1, 9]

    run(case())


@pytest.mark.parametrize("separator", "\x85\u2028\u2029")
def test_a_text_may_have_every_separator_of_lines_that_json_leaves_as_it_is(separator: str) -> None:
    async def case() -> None:
        event, found = (
            f'data: {{"text": "a{separator}b", "meta_info": {{"completion_tokens": 1}}}}\n\n'.encode(),
            list[int](),
        )
        # The connection ended in the second event, without an error.
        await counts(served(event[:19], event[19:], event[:30]), found)
        assert found == [1]

    run(case())


@pytest.mark.parametrize(
    ("made", "error", "message"),
    [
        ({"parts": [b'data: {"error": {"message": "too long"}}\n\n']}, ValueError, "too long"),
        ({"parts": [b"no such field"], "status": 400}, ValueError, "status 400: no such field"),
        ({"parts": [b'{"error": {"message": "too long"}}'], "status": 400}, ValueError, "status 400: too long"),
        ({"parts": [b"<html>bad gateway</html>"], "status": 502}, ConnectionError, "status 502 at http://localhost:1"),
        ({"parts": [EVENT % 1], "breaks": True}, ConnectionError, "RemoteProtocolError at http://localhost:1"),
    ],
)
def test_a_refusal_and_a_broken_connection_are_told_apart(made: dict[str, Any], error: type, message: str) -> None:
    async def case() -> None:
        link, found = served(*made.pop("parts"), **made), list[int]()
        with pytest.raises(error, match=message):
            await counts(link, found)
        await link.stop()
        with pytest.raises(ConnectionError, match="is closed"):
            await counts(link, found)

    asyncio.run(case())


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (500, b"Internal ServerLink Error", ValueError, "^status 500: Internal ServerLink Error$"),
        (400, b'{"error": {"message": "over the context"}}', ValueError, "^status 400: over the context$"),
        (400, b'{"success": false, "message": "no tensor w"}', ValueError, "^status 400: no tensor w$"),
        (200, b'{"success": false, "message": "no tensor w"}', ValueError, "^no tensor w$"),
        (422, b'{"detail": [{"msg": "Field required"}]}', ValueError, "status 422: .*Field required"),
        (503, b'{"error": {"message": "The request queue is full."}}', ValueError, "503: The request queue is full"),
        (502, b"<html><h1>502 Bad Gateway</h1></html>", ConnectionError, "^status 502 at http://localhost:1$"),
        (503, b"no healthy upstream", ConnectionError, "^status 503 at http://localhost:1$"),
        (504, b"", ConnectionError, "^status 504 at http://localhost:1$"),
        (200, b"<html>sign in</html>", ValueError, "^status 200: <html>sign in</html>$"),
    ],
)
def test_an_answer_to_a_call_is_read_or_its_reason_given(status: int, body: bytes, error: type, message: str) -> None:
    async def case() -> None:
        link = served(body, status=status)
        with pytest.raises(error, match=message):
            await link.call("generate", rid="r")
        await link.stop()

    run(case())


def test_an_answer_without_content_is_no_refusal() -> None:
    assert run(served().call("generate", rid="r")) is None


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"models": []}, "http://localhost:1 is no SGLang server"),
        ([], "http://localhost:1 is no SGLang server"),
        (INFO | {"dp_size": 8}, "has dp_size = 8, .*start one server for each replica"),
        (INFO | {"pp_size": 2}, "has pp_size = 2, .*start one server for each replica"),
    ],
)
def test_a_server_that_takes_no_weights_is_refused_at_once(info: Any, message: str) -> None:
    checks.check_server(INFO | {"dp_size": 1, "pp_size": None}, "http://localhost:1")
    with pytest.raises(ModelError, match=message):
        checks.check_server(info, "http://localhost:1")


@pytest.mark.parametrize("status", [302, 404, 405])
def test_a_server_of_another_kind_is_not_waited_for(status: int) -> None:
    async def case() -> None:
        def answer(request: httpx.Request) -> httpx.Response:
            return httpx.Response(status, text="no")

        async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost:1/v1") as client:
            with pytest.raises(ModelError, match=f"is no SGLang server: .* status {status}; .* has no path, such as"):
                await server._answer(client, "http://localhost:1/v1", 900.0)

    run(asyncio.wait_for(case(), 20))


@pytest.mark.parametrize(
    ("info", "names"),
    [
        ({}, []),
        ({"dtype": "auto", "enable_fp32_lm_head": True}, []),
        ({"dtype": "bfloat16", "enable_fp32_lm_head": False}, ["enable_fp32_lm_head = False"]),
        ({"dtype": "float16", "enable_fp32_lm_head": False}, ["dtype = float16", "enable_fp32_lm_head = False"]),
    ],
)
def test_settings_of_a_server_that_differ_from_the_learners_are_named(info: dict[str, Any], names: list[str]) -> None:
    found = list(checks.differences(info, {"dtype": "bfloat16", "enable_fp32_lm_head": True}))
    assert [sentence.split(",")[0] for sentence in found] == names


def test_rows_that_sglang_would_truncate_are_refused() -> None:
    assert checks.longest(INFO) == 512
    checks.check_room(512, 512)
    with pytest.raises(ModelError, match=r"rows of at most 512 tokens, and prompt and completion have up to 1,536"):
        checks.check_room(512, 1536)


@pytest.mark.parametrize("shown", [True, False])
def test_the_lines_of_sglang_are_logged_once_and_whole_if_it_writes_more_than_errors(
    shown: bool, log_lines: list[str], tmp_path: Path
) -> None:
    with (tmp_path / "log").open("ab", buffering=0) as written, (tmp_path / "log").open("rb") as file:
        output = ProcessOutput(file, logs_lines=shown)
        output.show()
        for part in (b"Load weight begin\nCapture cuda gra", b"ph end\n", b"", b"ValueError: no head\n"):
            written.write(part)
            output.show()
        assert output.reason() == "ValueError: no head"
        output.show()
    lines = ["SGLang: Load weight begin", "SGLang: Capture cuda graph end", "SGLang: ValueError: no head"]
    assert log_lines == (lines if shown else [])


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_proxy_of_the_environment_is_not_asked_for_servers_of_this_network(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proxy is a port at which nothing listens."""
    for other in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, "http://127.0.0.1:9")

    async def case(host: str) -> None:
        async with (
            server._client(f"http://{host}:{port}", "a key", 4) as client,
            client.stream("GET", "/server_info") as answer,
        ):
            assert answer.status_code == 404
            connection = answer.extensions["network_stream"].get_extra_info("socket")
            assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), "routers remember long requests"
        link = Client("", 1)
        with pytest.raises(TaskError, match=r"status 501"):
            await link.post(f"http://{host}:{port}/score", {})
        await link.close()

    with HTTPServer(("127.0.0.1", 0), SimpleHTTPRequestHandler) as other_server:
        port = other_server.server_port
        Thread(target=other_server.serve_forever, daemon=True).start()
        for host in ("127.0.0.1", "localhost"):
            run(case(host))
        other_server.shutdown()


@pytest.mark.parametrize(
    ("breaks", "status", "death"),
    [
        ([], 200, ""),
        ([httpx.ReadError], 200, ""),
        ([httpx.RemoteProtocolError], 200, ""),
        ([httpx.ReadError, httpx.ConnectError], 200, "gives no answer .ConnectError"),
        ([httpx.ReadTimeout], 200, "gives no answer .ReadTimeout"),
        ([], 502, "gives no answer .HTTPStatusError"),
    ],
)
def test_only_a_server_whose_http_process_is_gone_is_dead(breaks: list[type], status: int, death: str) -> None:
    """/health is as that of a server that is paused: it asks for a token, which does not come."""
    faults = list(breaks)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(503)
        if faults:
            raise faults.pop(0)("broken")
        return httpx.Response(status, json={"model_path": "m"})

    async def case() -> None:
        client = httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://localhost:1")
        found = await ServerLink(client, "http://localhost:1", 4, INFO).death()
        assert re.search(death, found) if death else found == ""
        await client.aclose()

    run(case())
