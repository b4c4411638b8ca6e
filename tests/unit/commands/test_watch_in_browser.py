"""The live page in a headless Chromium: curves with data, a trajectory opened by a click, a token's numbers."""

import asyncio
import html
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn
from browser import needs_chromium, on_a_phone, opened
from conftest import trajectory
from living_run import at_work
from msgspec import structs
from report_case import ALPHABET, run_folder

from streamppo.commands.look.watching import server
from streamppo.commands.look.watching.trajectories import Trajectories
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.queue.store import archive
from streamppo.queue.store.archive import Archive
from streamppo.rollout.endpoint.row import Row
from streamppo.rollout.endpoint.tree import NO_PLACE
from streamppo.rollout.engine import Completion
from streamppo.telemetry import metrics_file
from streamppo.types import Ints, Trajectory, floats

pytestmark = needs_chromium
SECONDS = 8
CLICKS = """
const until = async (found) => {
  while (!found()) await new Promise((after) => setTimeout(after, 50));
  return found();
};
document.addEventListener("DOMContentLoaded", async () => {
  const chart = await until(() => document.querySelector("#curves svg.curves"));
  const frame = chart.getBoundingClientRect();
  chart.dispatchEvent(new PointerEvent("pointermove", { clientX: frame.right - 1, clientY: frame.top + 5 }));
  document.body.dataset.value = chart.parentElement.querySelector(".tip").textContent;
  document.body.dataset.drawn = [...document.querySelectorAll("#curves svg.curves")].filter(
    (svg) => [...svg.querySelectorAll("polyline")].some((line) => line.getBoundingClientRect().width > 100)).length;
  (await until(() => document.querySelector("#list tr[data-row='2']"))).click();
  await until(() => document.querySelector("#text .token"));
  const tokens = document.querySelectorAll("#text .token");
  tokens[1].click();
  const choice = document.getElementById("colour");
  choice.value = "lag";
  choice.dispatchEvent(new Event("change"));
  document.body.dataset.deep = [...tokens].map((one) => one.style.getPropertyValue("--deep"));
  document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  document.body.dataset.place = location.hash;
});
"""
"""Points at the first curve, opens the third trajectory, chooses its second token, and notes the result."""


UNFOLD = """
document.addEventListener("DOMContentLoaded", async () => {
  while (!document.querySelector("#curves details")) await new Promise((after) => setTimeout(after, 20));
  document.querySelector("#curves details").open = true;
  document.body.dataset.before = document.querySelector("#head .soft").textContent;
});
"""


ON_A_PHONE = r"""
(() => {
  const broken = [], range = document.createRange();
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.parentElement.closest("svg, script, style, #text")) continue;
    for (const word of text.data.matchAll(/[^\s\/-]+/g)) {
      range.setStart(text, word.index);
      range.setEnd(text, word.index + word[0].length);
      const rows = [...range.getClientRects()].filter((one) => one.width > 0.5).map((one) => Math.round(one.top));
      if (new Set(rows).size > 1) broken.push(word[0]);
    }
  }
  const heights = [...document.querySelectorAll("svg text")].map((one) => one.getBoundingClientRect().height);
  const wide = document.documentElement.scrollWidth - innerWidth;
  const charts = document.querySelectorAll("#curves svg.curves").length;
  return JSON.stringify({ broken, wide, charts, width: innerWidth, text: Math.min(...heights.filter((one) => one)) });
})()
"""
"""Words in two rows, pixels beyond the screen, charts, and the height of the smallest text in a chart."""


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    return run_folder(tmp_path / "math", math_config())


NODES = """
document.addEventListener("DOMContentLoaded", async () => {
  while (!document.querySelector("#nodes li")) await new Promise((after) => setTimeout(after, 20));
  const nodes = [...document.querySelectorAll("#nodes li")];
  nodes.at(-1).click();
  const lefts = nodes.map((one) => one.getBoundingClientRect().left);
  document.body.dataset.lefts = lefts.map((one) => Math.round(one - lefts[0]));
  document.body.dataset.names = nodes.map((one) => one.firstChild.textContent).join("|");
  document.body.dataset.told = document.querySelector("#numbers td").textContent;
  document.body.dataset.wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
});
"""
"""Waits for the tree of the trajectory in the address, clicks its last node, and notes the result."""


def agents_run() -> Trajectory:
    """A run of an agent: two turns, a branch, and an undelivered answer, with harmful text."""
    row = Row()

    def answer(text: str, version: int) -> Completion:
        count, tokens = len(text), np.array([3 + ALPHABET.index(one) for one in text], np.int32)
        numbers = np.full(count, -0.5, np.float32), np.full(count, version, np.int32)
        return Completion(tokens, *numbers, "stop", cached=2)

    def ids(text: str) -> Ints:
        return np.array([3 + ALPHABET.index(one) for one in text], np.int32)

    opened, ended = row.add(NO_PLACE, ids("1+1="), answer("<1>=", 22), 1)
    row.add(ended, ids("22=" * 30), answer("2", 23), 2)
    row.add(opened, ids("+3="), answer("44" * 20, 23), 3)
    columns = row.columns([1, 2])
    rest = slice(row.prompt, None)
    made = trajectory(columns.tokens[rest].tolist(), prompt=columns.tokens[: row.prompt].tolist())
    named = {"mask": columns.mask, "versions": columns.versions, "logprobs": columns.logprobs}
    return structs.replace(
        made,
        **{name: column[rest].tobytes() for name, column in named.items()},
        branches=columns.branches.tobytes(),
        turns=row.turn_column([1, 2]),
    )


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first trajectory of every batch is the run of an agent."""
    read = Archive.batch_and_record

    def with_tree(found: Archive, version: int) -> Any:
        batch, _ = read(found, version)
        first = structs.replace(agents_run(), identity=batch.trajectories[0].identity)
        return structs.replace(batch, trajectories=(first, *batch.trajectories[1:])), {}

    monkeypatch.setattr(Archive, "batch_and_record", with_tree)


@pytest.fixture
def serve(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Serve the page with one more script; the address comes back, and the server ends with the test."""
    found = server.listen("127.0.0.1", 0)
    settings = uvicorn.Config(server.application(run, [], None), log_level="warning", lifespan="off")
    serving = uvicorn.Server(settings)
    thread = threading.Thread(target=serving.run, kwargs={"sockets": [found]})

    def started(script: str) -> str:
        (tmp_path / "more.js").write_text(script)
        kind, parts = server.ASSETS["/watch.js"]
        monkeypatch.setitem(server.ASSETS, "/watch.js", (kind, [*parts, tmp_path / "more.js"]))
        thread.start()
        while not serving.started:
            time.sleep(0.01)
        return server.address(found, "127.0.0.1", None)

    yield started
    serving.should_exit = True
    thread.join()


def noted(dom: str, name: str) -> str:
    found = re.search(rf'<body[^>]* data-{name}="([^"]*)"', dom)
    assert found is not None, f"the script has not come to {name}"
    return html.unescape(found[1])


@pytest.mark.parametrize("width", [500, 1400])
def test_curves_have_data_and_a_click_opens_a_trajectory_whose_tokens_tell_their_numbers(
    run: Path, serve: Callable[[str], str], tmp_path: Path, width: int
) -> None:
    dom, errors = opened(serve(CLICKS), width, tmp_path / "browser", SECONDS)
    assert errors == []
    assert int(noted(dom, "drawn")) == dom.partition('id="more"')[0].count('class="curves"') >= 6
    assert noted(dom, "value").startswith("update 24  ·  reward 0.")
    assert noted(dom, "wide") == "0", "the page is wider than the window"
    told = dict(re.findall(r"<td>([^<]*)</td><td class=\"number\">([^<]*)</td>", dom.partition('id="numbers"')[2]))
    one = archive.open(run).batch(23).trajectories[2]
    assert html.unescape(told["token 2 of 3"]) == '"<"'
    assert float(told["log-prob"]) == pytest.approx(floats(one.logprobs)[1], rel=1e-3)
    assert (told["version"], told["lag"]) == ("23", "0")
    # The first token is a version older than the others: deepest.
    assert noted(dom, "deep") == "1,0,0"
    assert noted(dom, "place") == "#update=24&row=2&token=1&colour=lag"


@pytest.mark.slow
@pytest.mark.usefixtures("tree")
@pytest.mark.parametrize("width", [500, 1400])
def test_the_tree_of_an_agents_run_is_drawn_and_a_click_on_a_node_goes_to_its_tokens(
    serve: Callable[[str], str], tmp_path: Path, width: int
) -> None:
    dom, errors = opened(serve(NODES) + "#update=24&row=0", width, tmp_path / "browser", SECONDS)
    assert errors == []
    assert noted(dom, "names") == "prompt|turn 1|message|turn 2|branch after token 3|turn 3"
    lefts = [int(one) for one in noted(dom, "lefts").split(",")]
    assert lefts[:4] == [0] * 4 and lefts[4] == lefts[5] > 0
    assert noted(dom, "told") == f"token {agents_run().num_tokens - 39} of {agents_run().num_tokens}"
    assert "sampled but not received" in dom.partition('id="numbers"')[2]
    assert noted(dom, "wide") == "0", "the page is wider than the window"
    told = html.unescape(dom.partition('id="nodes"')[2].partition("</ol>")[0])
    assert "not received, and not trained on" in told and "2 of the 4 tokens before it were reused" in told
    assert "&lt;1&gt;=" in dom and "<1>" not in dom
    assert "2 turns" not in dom and "3 turns, 1 branch, 40 tokens not received" in dom


@pytest.mark.slow
@pytest.mark.usefixtures("tree")
def test_a_phone_shows_the_tree_of_a_running_run_whole(run: Path, serve: Callable[[str], str], tmp_path: Path) -> None:
    with at_work(run, configfile.load(run / configfile.CONFIG)):
        address = serve("") + "#update=24&row=0"
        found = json.loads(asyncio.run(on_a_phone(address, tmp_path / "browser", ON_A_PHONE, SECONDS)))
        nodes = asyncio.run(
            on_a_phone(address, tmp_path / "again", "document.querySelectorAll('#nodes li').length", SECONDS)
        )
    assert (found["width"], found["wide"], nodes) == (400, 0, 6)


@pytest.mark.slow
def test_the_page_goes_on_with_new_lines_and_what_was_unfolded_stays_so(
    run: Path, serve: Callable[[str], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / metrics_file.METRICS
    lines = path.read_text().splitlines(keepends=True)
    place = next(place for place, line in enumerate(lines) if '"update": 20,' in line)
    path.write_text("".join(lines[:place]))
    batch = Trajectories.batch

    def then_the_rest(found: Trajectories, update: int | None) -> dict[str, object]:
        """The run continues once the page has its first batch."""
        with path.open("a") as file:
            file.writelines(lines[place:])
        lines[place:] = []
        return batch(found, update)

    monkeypatch.setattr(Trajectories, "batch", then_the_rest)
    dom, errors = opened(serve(UNFOLD), 1400, tmp_path / "browser", SECONDS)
    assert errors == []
    assert noted(dom, "before") == "update 19 of 400"
    assert "update 24 of 400" in dom and "finished" in dom.partition("</header>")[0]
    curves = dom.partition('id="curves"')[2].partition('id="more"')[0]
    assert curves.count("<details open") == 1


def test_an_error_in_the_page_is_seen(serve: Callable[[str], str], tmp_path: Path) -> None:
    _, errors = opened(serve("nobody.knows();"), 500, tmp_path / "browser", SECONDS)
    assert len(errors) == 1 and "nobody is not defined" in errors[0]


@pytest.mark.slow
def test_a_phone_shows_the_page_of_a_running_run_whole(run: Path, serve: Callable[[str], str], tmp_path: Path) -> None:
    with at_work(run, configfile.load(run / configfile.CONFIG)):
        found = json.loads(asyncio.run(on_a_phone(serve(""), tmp_path / "browser", ON_A_PHONE, SECONDS)))
    assert (found["width"], found["wide"], found["broken"]) == (400, 0, [])
    assert found["charts"] >= 6 and found["text"] >= 10
