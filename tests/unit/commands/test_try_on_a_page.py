"""The page's button: who may start a process, what it is told, and that there is one, which ends."""

import asyncio
import html
import json
import os
import re
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import uvicorn
from browser import needs_chromium, opened
from report_case import run_folder

from streamppo.commands.look.watching import server, tries
from streamppo.commands.trial import Trial, TrialSample, VersionTrial
from streamppo.config.sections import Config
from streamppo.queue.store import archive

LOCAL, KEY = "http://127.0.0.1:8484", "the key of the terminal"
ASKED = {"update": 24, "row": 2, "token": 1, "versions": [20, 24], "n": 3}
GIVEN = {"origin": LOCAL, tries.KEY: KEY}
ANSWER = Trial(
    prompt="1+1=<b>",
    at=1,
    before="2",
    versions=(
        VersionTrial(
            20, 20, 0.5, 0.1, 0.25, (TrialSample(1.0, 1, "<i>3", "stop"), TrialSample(None, reason="no <answer>"))
        ),
        VersionTrial(24, 16, 0.75, None, None, (TrialSample(0.5, 1, "4", "length"), TrialSample(1.0, 1, "5")), True),
    ),
    number=7,
    sample=0,
    update=24,
    reward=0.0,
    difference=0.25,
    difference_error=0.125,
)
ANSWERS = f"import sys; sys.stderr.write(repr(sys.argv[1:])); print({msgspec.json.encode(ANSWER).decode()!r})"
REFUSES = "import sys; sys.stderr.write('a log line\\nstreamppo: RunError: ' + ' '.join(sys.argv[1:])); sys.exit(1)"


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    return run_folder(tmp_path / "math", math_config())


def post(run: Path, *bodies: Any, key: str = KEY, base: str = LOCAL, headers: Any = GIVEN) -> list[httpx.Response]:
    """Answers to requests that are made at the same time."""

    async def answers() -> list[httpx.Response]:
        app = httpx.ASGITransport(server.application(run, [], None, key))
        async with httpx.AsyncClient(verify=False, transport=app, base_url=base, timeout=60) as client:
            asked: list[Awaitable[httpx.Response]] = [
                client.post("/try", content=body if isinstance(body, bytes) else json.dumps(body), headers=headers)
                for body in bodies
            ]
            return list(await asyncio.gather(*asked))

    return asyncio.run(answers())


@pytest.fixture
def nobody_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": LOCAL},
        {tries.KEY: KEY},
        {"origin": "http://evil.example", tries.KEY: KEY},
        {"origin": "http://127.0.0.1:9999", tries.KEY: KEY},
        {"origin": "null", tries.KEY: KEY},
        {"origin": LOCAL, tries.KEY: ""},
        {"origin": LOCAL, tries.KEY: KEY[:-1]},
    ],
)
def test_a_request_without_the_key_or_of_another_page_starts_nothing(run: Path, headers: dict[str, str]) -> None:
    (answer,) = post(run, ASKED, headers=headers)
    assert answer.status_code == 403 and "open the address that `streamppo watch` has printed" in answer.text


@pytest.mark.usefixtures("nobody_starts")
def test_without_a_key_nobody_starts_anything_and_no_other_name_reaches_it(run: Path) -> None:
    (answer,) = post(run, ASKED, key="", headers={"origin": LOCAL, tries.KEY: ""})
    assert answer.status_code == 403
    elsewhere = "http://rebound.example"
    (answer,) = post(run, ASKED, base=elsewhere, headers={"origin": elsewhere, tries.KEY: KEY})
    assert answer.status_code == 400 and "Invalid host" in answer.text


@pytest.mark.usefixtures("nobody_starts")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff",
        b"[" * 2000,
        b" " * 5000,
        {**ASKED, "n": 65},
        {**ASKED, "n": 0},
        {**ASKED, "versions": []},
        {**ASKED, "versions": [1, 2, 3]},
        {**ASKED, "versions": [-1]},
        {**ASKED, "token": -1},
        {**ASKED, "token": "--trust"},
        {**ASKED, "trust": True},
    ],
)
def test_what_is_no_request_starts_nothing(run: Path, body: Any) -> None:
    (answer,) = post(run, body)
    assert answer.status_code == 400


@pytest.mark.usefixtures("nobody_starts")
def test_a_trajectory_that_is_not_there_is_named(run: Path) -> None:
    (answer,) = post(run, {**ASKED, "row": 99})
    assert answer.status_code == 404 and "update 24 has no trajectory 99" in answer.text


def test_the_command_is_asked_for_that_completion_and_token_and_its_answer_comes_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = archive.open(run).batch(23).trajectories[2].identity
    monkeypatch.setattr(tries, "PROGRAM", REFUSES)
    (answer,) = post(run, ASKED)
    assert answer.status_code == 422
    words = f"try {run} --json --prompt={identity.prompt} --sample={identity.sample} --attempt={identity.attempt}"
    assert answer.json()["error"] == f"RunError: {words} --at=1 -n=3 --version 20 24"
    monkeypatch.setattr(tries, "PROGRAM", ANSWERS)
    (answer,) = post(run, ASKED)
    assert answer.status_code == 200 and answer.json()["names"] == ["version 20", "version 24"]
    assert answer.json()["rows"] == [["1  '<i>3'", "0.5  '4' (cut off)"], ["-  '' (no <answer>)", "1  '5'"]]
    assert "version 24 minus 20: 0.250 ± 0.125, in pairs of the same random numbers" in answer.json()["lines"]
    assert "version 24 (replayed from version 16): mean reward 0.750 of 2" in answer.json()["lines"]


def test_one_is_under_way_at_a_time(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries, "PROGRAM", f"import time; time.sleep(0.5); {ANSWERS}")
    codes = [answer.status_code for answer in post(run, ASKED, ASKED, ASKED)]
    assert sorted(codes) == [200, 409, 409]


def test_one_that_takes_too_long_is_ended_and_the_next_one_is_answered(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "pid"
    stubborn = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"
    lasting = f"{stubborn}; import os, time; open({str(told)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    monkeypatch.setattr(tries, "PROGRAM", lasting)
    monkeypatch.setattr(tries, "LONGEST_S", 1.0)
    monkeypatch.setattr(tries, "ENDING_S", 0.1)
    while not told.exists() or not told.read_text():
        (answer,) = post(run, ASKED)
        assert answer.status_code == 504 and "it took more than 1 s and was ended" in answer.text
    with pytest.raises(ProcessLookupError):
        os.kill(int(told.read_text()), 0)


# --- in the browser ------------------------------------------------------------------------------------------

CLICKS = """
const until = async (found) => {
  while (!found()) await new Promise((after) => setTimeout(after, 50));
  return found();
};
document.addEventListener("DOMContentLoaded", async () => {
  (await until(() => document.querySelector("#list tr[data-row='2']"))).click();
  await until(() => document.querySelector("#text .token"));
  document.querySelectorAll("#text .token")[1].click();
  document.body.dataset.version = document.getElementById("versions").value;
  document.getElementById("versions").value = "20 24";
  document.getElementById("tries").value = 3;
  document.querySelector("#try button").click();
  const status = document.getElementById("try-status");
  await until(() => document.querySelector("#continuations td") || status.textContent.includes("address"));
  document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.body.dataset.place = location.hash;
});
"""


def shown(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, behind: str, width: int) -> str:
    (tmp_path / "more.js").write_text(CLICKS)
    kind, parts = server.ASSETS["/watch.js"]
    monkeypatch.setitem(server.ASSETS, "/watch.js", (kind, [*parts, tmp_path / "more.js"]))
    found = server.listen("127.0.0.1", 0)
    serving = uvicorn.Server(
        uvicorn.Config(server.application(run, [], None, KEY), log_level="warning", lifespan="off")
    )
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [found]})
    thread.start()
    try:
        while not serving.started:
            time.sleep(0.01)
        dom, errors = opened(server.address(found, "127.0.0.1", None) + behind, width, tmp_path / "browser", 8)
    finally:
        serving.should_exit = True
        thread.join()
    assert [error for error in errors if "403" not in error] == []
    return dom


@pytest.mark.sampled(1)
@needs_chromium
@pytest.mark.parametrize("width", [500, 1400])
def test_a_click_on_a_token_and_the_button_show_what_two_versions_have_said(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setattr(tries, "PROGRAM", ANSWERS)
    dom = shown(run, tmp_path, monkeypatch, f"#key={KEY.replace(' ', '%20')}", width)
    table = dom.partition('id="continuations"')[2].partition("</table>")[0]
    cells = [html.unescape(cell) for cell in re.findall(r"<td>([^<]*)</td>", table)]
    assert cells == ["0", "1  '<i>3'", "0.5  '4' (cut off)", "1", "-  '' (no <answer>)", "1  '5'"]
    assert "version 24 minus 20: 0.250" in dom and "<i>3" not in table, "text of a run is text"
    assert 'data-version="23"' in dom, "the version that the batch was made of"
    assert 'data-wide="0"' in dom, "the page is wider than the window"
    assert 'data-place="#update=24&amp;row=2&amp;token=1"' in dom, "the key is not a part of an address to pass on"


@pytest.mark.slow
@needs_chromium
def test_without_the_key_the_page_says_which_address_to_open(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dom = shown(run, tmp_path, monkeypatch, "", 1400)
    assert "open the address that `streamppo watch` has printed" in dom.partition('id="try-status"')[2]
