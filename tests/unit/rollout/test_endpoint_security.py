"""The claims of docs/security.md about the endpoint: access with a key, without, from a page, as another user."""

import asyncio
import logging
import os
import secrets
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import agent_case
import httpx
import pytest
from agent_case import Case, Speaks, served
from conftest import REPOSITORY, SUPPORT

from streamppo.config.task import AgentEnvironment
from streamppo.errors import EnvironmentFailed
from streamppo.rollout.endpoint import server
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import Player
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Prompt

CHAT = "/v1/chat/completions"
ASKED = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "a"}]}
PLAYED = Prompt(text="1+2", columns={})
PROGRAM = """
import json, os, sys, time, urllib.request
with open(sys.argv[1], "w") as file:
    file.write(f"{os.getpid()} {os.environ['OPENAI_API_KEY']}\\n")
body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "a"}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
asked = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
urllib.request.urlopen(asked).read()
while not os.path.exists(sys.argv[1] + ".seen"):
    time.sleep(0.02)
print('{"reward": 1.0}')
"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(tokenizer: Tokenizer, test: Callable[[Case, httpx.AsyncClient], Awaitable[None]]) -> None:
    async def main() -> None:
        async with (
            served(tokenizer) as case,
            httpx.AsyncClient(verify=False, base_url=case.endpoint.address, trust_env=False) as client,
        ):
            await test(case, client)

    asyncio.run(main())


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


# --- whoever has a key -------------------------------------------------------------------------------------------


def test_a_key_reaches_no_response_and_no_reward_of_another_run(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        other = case.opened()
        made = (await client.post(CHAT, json=ASKED, headers=bearer(case.key))).json()
        given = {"reward": 9.0, "response_id": made["id"]}
        refused = await client.post("/v1/reward", json=given, headers=bearer(other.key))
        assert refused.status_code == 400 and "no response of this run is called" in refused.text
        follow = {"model": "m", "input": "more", "previous_response_id": made["id"]}
        refused = await client.post("/v1/responses", json=follow, headers=bearer(other.key))
        assert refused.status_code == 400 and "no response of this run is called" in refused.text
        assert (await client.post("/v1/reward", json={"reward": 9.0}, headers=bearer(other.key))).status_code == 200
        assert case.session.rewards == [] and case.session.turns[0].reward == 0.0
        assert other.rewards == [9.0] and other.turns == []

    run(tokenizer, test)


def test_keys_are_random_one_for_each_run_and_compared_in_constant_time(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare = secrets.compare_digest

    def seen(known: Any, given: Any) -> bool:
        compared.append((known, given))
        return compare(known, given)

    monkeypatch.setattr(server.secrets, "compare_digest", seen)

    async def test(case: Case, client: httpx.AsyncClient) -> None:
        keys = [case.opened().key for _ in range(50)]
        hidden = [key.split("-", 2)[2] for key in keys]
        assert len(set(hidden)) == 50 and min(map(len, hidden)) >= 43, "256 bits"
        # The part of a key that says whose it is, is no secret; nor does it open anything.
        wrong = "-".join([*case.key.split("-", 2)[:2], hidden[0]])
        for key, status in {case.key: 200, wrong: 401, case.key[:-1]: 401, "sp-1-": 401, "sp-77-x": 401}.items():
            assert (await client.get("/v1/models", headers=bearer(key))).status_code == status
            assert compared[-1][1] == key.encode()

    run(tokenizer, test)
    assert len(compared) == 5


# --- whoever has none --------------------------------------------------------------------------------------------


def test_without_a_key_no_body_is_read(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(case.endpoint.address).port)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2**34}\r\n\r\n"
        writer.write(head.encode())
        # The answer comes although nothing of the body was sent.
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 10)
        writer.close()

    run(tokenizer, test)


def test_a_page_of_a_browser_here_gets_nothing_and_may_read_nothing(tokenizer: Tokenizer) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        # A form or an image needs no leave, and has no key; with a key a browser asks for leave first.
        form = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        answers = [await client.post(CHAT, content="{}", headers=form), await client.get("/v1/models", headers=form)]
        preflight = {**form, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        answers += [await client.options(CHAT, headers=preflight)]
        answers += [await client.get("/v1/models", headers={**bearer(case.key), "Host": "rebound.example"})]
        assert [one.status_code for one in answers] == [401, 401, 405, 403]
        assert not [name for one in answers for name in one.headers if name.startswith("access-control")]

    run(tokenizer, test)


# --- logs, and other users ---------------------------------------------------------------------------------------


def test_no_key_is_in_a_log_whether_it_comes_in_a_header_or_in_an_address(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(case: Case, client: httpx.AsyncClient) -> None:
        port = httpx.URL(case.endpoint.address).port
        ended = case.opened()
        case.endpoint.close(ended)
        for key in (case.key, ended.key, "sp-9-unknown"):
            for path, header in ((CHAT, f"Authorization: Bearer {key}\r\n"), (f"/key/{key}{CHAT}", "")):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                # The engine fails over the broken body of the last, the client hangs up on all.
                writer.write(
                    f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{header}Content-Length: 2\r\n\r\n{{}}".encode()
                )
                assert (await reader.readline()).startswith(b"HTTP/1.1 4")
                writer.close()
        for name in (case.key, ended.key):
            assert name not in caplog.text and name.split("-", 2)[2] not in caplog.text

    with caplog.at_level(logging.DEBUG):
        for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):
            logging.getLogger(name).propagate = True
        run(tokenizer, test)


@pytest.mark.parametrize("name", ["tells_its_key", "explains_its_key"])
def test_what_an_agent_says_of_its_key_goes_nowhere(name: str, tokenizer: Tokenizer) -> None:
    async def main() -> str:
        config = AgentEnvironment(agent=f"{SUPPORT / 'agents_of_every_kind.py'}:{name}")
        player = Player(Speaks(tokenizer, lambda _: "hi"), tokenizer, config)
        assert player.agents is not None
        try:
            return (await player.play(PLAYED, Sampling(32))).end.explanation
        except EnvironmentFailed as error:
            return str(error)
        finally:
            await player.agents.close()

    said = asyncio.run(main())
    assert said.count("[key]") == (2 if name == "tells_its_key" else 1) and "sp-" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_another_user_sees_no_key_in_processes_and_you_see_it_in_your_own(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(PROGRAM)
    told = tmp_path / "told"

    async def main() -> tuple[str, str, list[int]]:
        config = AgentEnvironment(command=(sys.executable, str(tmp_path / "agent.py"), str(told)), timeout_s=60)
        player = Player(Speaks(tokenizer, lambda _: "hi"), tokenizer, config)
        assert player.agents is not None
        playing = asyncio.create_task(player.play(PLAYED, Sampling(32)))
        try:
            while not told.exists() or not told.read_text().endswith("\n"):
                await asyncio.sleep(0.02)
            process, key = told.read_text().split()
            lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
            shown = [number for number, line in enumerate(lines) if key.encode() in line]
            environ = Path(f"/proc/{process}/environ")
            assert key.encode() in environ.read_bytes(), "you read your own processes"
            as_nobody = subprocess.run(
                ["/bin/cat", environ],
                capture_output=True,
                check=False,
                text=True,
                cwd="/",
                **({"user": 65534, "group": 65534, "extra_groups": []} if not os.geteuid() else {}),
            )
            Path(f"{told}.seen").touch()
            await playing
            return key, as_nobody.stderr, shown
        finally:
            playing.cancel()
            await player.agents.close()

    _, refused, shown = asyncio.run(main())
    assert shown == [], "a command line is for all users"
    assert os.geteuid() or "Permission" in refused


def test_the_page_about_security_names_the_bounds_that_the_endpoint_has() -> None:
    page = (REPOSITORY / "docs" / "security.md").read_text()
    assert f"at most {server.BODY_BYTES // 2**20} MiB" in page
    assert "at most 256 at the same time" in page and "random key (256 bits)" in page
