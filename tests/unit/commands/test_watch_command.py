"""The live page's server: sections during a run, batches of the archive, and refused foreign requests."""

import asyncio
import json
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import httpx
import numpy as np
import pytest
from conftest import COUNTERS, trajectory
from msgspec import structs
from report_case import BATCH, run_folder
from starlette.applications import Starlette

from streamppo import cli
from streamppo.commands.look.watching import run_tail, server
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver.run_folder import driver_lock
from streamppo.errors import RunError
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.types import Batch, TokenRecord, floats, ints

LOCAL = "http://127.0.0.1:8484"


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_tail, "JOURNAL_S", 0.0)
    return run_folder(tmp_path / "math", math_config())


def get(app: Starlette, *paths: str, base: str = LOCAL) -> list[httpx.Response]:
    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(verify=False, transport=httpx.ASGITransport(app), base_url=base) as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(answers())


def app_of(run: Path, *others: Path, token: str | None = None) -> Starlette:
    return server.application(run, list(others), token)


def without_end(run: Path, updates: int) -> list[str]:
    """Leave only the lines of the first updates; returns the others."""
    path = run / metrics_file.METRICS
    lines = path.read_text().splitlines(keepends=True)
    cut = next(place for place, line in enumerate(lines) if json.loads(line).get("update", 0) > updates)
    path.write_text("".join(lines[:cut]))
    return lines[cut:]


# --- a run as it continues -----------------------------------------------------------------------------------


def test_new_lines_change_the_sections_and_nothing_else_does(run: Path) -> None:
    rest = without_end(run, 20)
    app = app_of(run)
    (first,) = get(app, "/sections")
    found = first.json()
    assert found["version"] == 20 and "update 20 of" in found["sections"]["head"]
    (same,) = get(app, f"/sections?tag={found['tag']}")
    assert same.json()["tag"] == found["tag"] and "sections" not in same.json()
    for lines, version, words in ((rest[:1], 21, "killed"), (rest[1:], 24, "finished")):
        with (run / metrics_file.METRICS).open("a") as file:
            file.writelines(lines)
        (later,) = get(app, f"/sections?tag={found['tag']}")
        found = later.json()
        assert found["version"] == version and words in found["sections"]["head"]


def test_a_run_that_ends_while_the_page_reads_it_is_not_said_to_be_killed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_end(run, 20)
    watched, read = run_tail.WatchedRun(run, "math"), metrics_file.LineReader.read
    with ExitStack() as driver:
        driver.enter_context(driver_lock(run))
        monkeypatch.setattr(metrics_file.LineReader, "read", lambda reader: (read(reader), driver.close())[0])
        watched.tag()
    assert watched.run_view().condition == "running"
    watched.tag()
    assert watched.run_view().condition == "killed"


def test_a_run_that_dies_and_whose_folder_goes_is_shown_as_it_was(run: Path) -> None:
    without_end(run, 20)
    app = app_of(run)
    with driver_lock(run):
        (alive,) = get(app, "/sections")
    assert 'badge running">running' in alive.json()["sections"]["head"]
    (dead,) = get(app, "/sections")
    assert 'badge killed">killed' in dead.json()["sections"]["head"]
    assert {name: text for name, text in dead.json()["sections"].items() if name not in ("head", "headline")} == {
        name: text for name, text in alive.json()["sections"].items() if name not in ("head", "headline")
    }
    shutil.rmtree(run)
    (gone,) = get(app, "/sections")
    assert gone.json()["sections"]["curves"] == dead.json()["sections"]["curves"]
    assert gone.json()["sections"]["data"] == dead.json()["sections"]["data"]


def test_a_resume_with_other_overrides_changes_the_page_that_is_open(run: Path) -> None:
    config = configfile.load(run / configfile.CONFIG, ["updates=24"])
    configfile.save(config, run)
    watched = run_tail.WatchedRun(run, "math")
    before = watched.tag()
    assert watched.tag() == before and watched.run_view().state.updates == 24
    curve = list(watched.run_view().state.curves["reward"].means)
    configfile.save(configfile.change(config, ["updates=99", "queue.batch_size=8"]), run)
    assert watched.tag() != before
    state = watched.run_view().state
    assert (state.updates, state.batch_size, state.version) == (99, 8, 24) and state.curves["reward"].means == curve
    assert "updates = 99" in watched.view.config and watched.view.notes == []


def test_a_run_that_has_just_begun_has_a_page(run: Path) -> None:
    (run / metrics_file.METRICS).unlink()
    (run / "journal.sqlite").unlink()
    (answer, batch) = get(app_of(run), "/sections", "/batch")
    assert answer.json()["version"] == 0 and "No update has been made." in answer.json()["sections"]["curves"]
    assert batch.status_code == 404 and "nothing was sampled in it yet" in batch.json()["error"]


def test_failures_and_restarts_are_told_with_their_reasons_escaped(run: Path) -> None:
    with (run / metrics_file.METRICS).open("a") as file:
        file.write(json.dumps({"restart": "learner", "wall_s": 70.0, "reason": "killed <by> the kernel"}) + "\n")
    (answer,) = get(app_of(run), "/sections")
    trouble = answer.json()["sections"]["trouble"]
    assert "&lt;no&gt; answer" in trouble and "<no>" not in trouble
    assert "killed &lt;by&gt; the kernel" in trouble


def test_pipeline_shows_the_engines_and_their_time(run: Path) -> None:
    with (run / metrics_file.METRICS).open("a") as file:
        for wall_s, tokens, idle_s in ((50.0, 1000, 2.0), (60.0, 5000, 4.5)):
            engine = {"engine": "rollout-0", "wall_s": wall_s, "version": 3, "tokens": tokens, "sampled": None}
            file.write(json.dumps({**engine, "busy_s": wall_s - 40 - idle_s, "idle_s": idle_s}) + "\n")
    (answer,) = get(app_of(run), "/sections")
    pipeline = answer.json()["sections"]["pipeline"]
    assert "1 actor with version 3" in pipeline and "idle 25%" in pipeline
    assert "rollout-0: 400 tokens/s, idle 25%, version 3" in pipeline
    assert "Waiting: <b>" in pipeline


# --- runs beside it ------------------------------------------------------------------------------------------


def test_runs_beside_it_are_offered_and_drawn_in_the_same_curves(run: Path, math_config: Callable[..., Config]) -> None:
    other = run_folder(run.parent / "other", math_config(), updates=20)
    app = app_of(run)
    page, alone, both = get(app, "/", "/sections", "/sections?with=other")
    assert 'value="other">other' in page.text
    assert 'data-label="reward"' in alone.json()["sections"]["curves"]
    assert 'data-label="math"' in both.json()["sections"]["curves"]
    assert 'data-label="other"' in both.json()["sections"]["curves"]
    assert alone.json()["tag"] != both.json()["tag"]
    (asked,) = get(app_of(run, other), "/")
    assert 'value="other" checked>other' in asked.text


def test_runs_of_one_name_are_told_apart(run: Path, tmp_path: Path, math_config: Callable[..., Config]) -> None:
    for place in ("a", "b"):
        (tmp_path / "elsewhere" / place).mkdir(parents=True)
    others = [run_folder(tmp_path / "elsewhere" / place / "math", math_config(), updates=20) for place in ("a", "b")]
    page, answer = get(app_of(run, *others), "/", "/sections?with=a/math&with=b/math")
    assert 'value="a/math" checked' in page.text and 'value="b/math" checked' in page.text
    curves = answer.json()["sections"]["curves"]
    assert all(f'data-label="{name}"' in curves for name in ("math", "a/math", "b/math"))


@pytest.mark.parametrize("name", ["nobody", "../../etc", "math/archive", "", "."])
def test_no_folder_but_those_that_are_offered_is_read(run: Path, name: str) -> None:
    (answer,) = get(app_of(run), f"/sections?with={name}")
    assert answer.status_code == 404 and "no such run" in answer.json()["error"]


# --- trajectories --------------------------------------------------------------------------------------------


def test_the_numbers_of_a_token_are_those_of_the_archive(run: Path) -> None:
    newest, opened = get(app_of(run), "/batch", "/batch/7/2")
    assert newest.json()["update"] == 24 and newest.json()["updates"] == [1, 24]
    assert len(newest.json()["rows"]) == BATCH and newest.json()["rows"][1]["begins"] == "1<2"
    one, found = archive.open(run).batch(6).trajectories[2], opened.json()
    columns = {column["name"]: column["values"] for column in found["columns"]}
    assert found["ids"] == ints(one.tokens).tolist() and found["texts"] == ["1", "<", "2"]
    assert found["prompt"] == "1+1=" and found["reward"] == 0.5
    assert columns["version"] == ints(one.versions).tolist() == [5, 6, 6]
    assert columns["lag"] == [1, 0, 0]
    assert columns["log-prob"] == floats(one.logprobs).tolist()
    assert columns["young enough"] == [1, 1, 1]
    assert columns.keys() == {"lag", "version", "young enough", "log-prob"}, "nothing is shown that is not kept"
    assert "Advantages" in found["missing"]


def test_the_learners_numbers_rewards_and_a_teachers_log_probs_stand_at_their_tokens(run: Path) -> None:
    rows = (trajectory([3], versions=[24]), trajectory([4, 5, 6], versions=[23, 0, 24], mask=[True, False, True]))
    given = {"token_rewards": [0.25, 0.0, -1.0], "teacher_logprobs": [-0.5, 0.0, -2.0]}
    more = {name: np.float32(column).tobytes() for name, column in given.items()}
    told = structs.replace(rows[1], explanation="<so-so>", **more)
    batch = Batch(version=24, min_version=24, trajectories=(rows[0], told))
    journal, made = Journal(run / "journal.sqlite"), archive.open(run)
    journal.fence()
    numbers = {
        "values": [9, 1, 2, 3],
        "proximal_logprobs": [9, -1, 9, -1 + np.log(2)],
        "advantages": [9, 0.5, 9, -0.5],
    }
    learned = TokenRecord(**{name: np.float32(column).tobytes() for name, column in numbers.items()})
    archived = made.write(batch, learned)
    journal.write(Changes(COUNTERS), [PublishedVersion(version=25, digest="", archived=archived)], made.settle)
    journal.close()
    (answer,) = get(app_of(run), "/batch/25/1")
    found = answer.json()
    assert (found["sampled"], found["explanation"]) == ([True, False, True], "<so-so>")
    assert found["missing"] == ""
    columns = {column["name"]: column["values"] for column in found["columns"]}
    assert columns.pop("learner's log-prob") == [-1, None, pytest.approx(-1 + np.log(2))]
    assert columns.pop("log-ratio") == [0, None, pytest.approx(np.log(2))]
    assert columns.pop("ratio") == [1, None, pytest.approx(2)]
    assert columns == {
        "lag": [1, None, 0],
        "version": [23, None, 24],
        "young enough": [0, None, 1],
        "log-prob": [-1, None, -1],
        "value": [1, None, 3],
        "advantage": [0.5, None, -0.5],
        "reward": [0.25, None, -1],
        "teacher's log-prob": [-0.5, None, -2],
        "difference": [0.5, None, -1],
    }


@pytest.mark.parametrize("path", ["/batch/99", "/batch/7/4", "/batch/99/0"])
def test_a_batch_or_a_trajectory_that_is_not_there_is_named(run: Path, path: str) -> None:
    (answer,) = get(app_of(run), path)
    assert answer.status_code == 404 and answer.json()["error"]


# --- who may ask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", ["http://evil.example", "http://evil.example:8484", "http://127.0.0.1.evil.example"])
def test_on_loopback_a_name_of_elsewhere_is_refused(run: Path, base: str) -> None:
    assert [one.status_code for one in get(app_of(run), "/", "/sections", base=base)] == [400, 400]


@pytest.mark.parametrize("base", [LOCAL, "http://localhost:9", "http://[::1]:8484"])
def test_on_loopback_loopback_names_are_answered(run: Path, base: str) -> None:
    assert [one.status_code for one in get(app_of(run), "/", "/watch.js", "/watch.css", base=base)] == [200] * 3


def test_elsewhere_nothing_is_answered_without_the_token_and_the_token_leaves_the_address(run: Path) -> None:
    app, base = app_of(run, token="secret"), "http://gpu-1:8484"
    paths = ["/", "/sections", "/batch", "/watch.js", "/?token=", "/?token=wrong", "/sections?token=secret"]
    assert [one.status_code for one in get(app, *paths, base=base)] == [403] * len(paths)
    entered, *after = get(app, "/?token=secret", "/", "/sections", base=base)
    assert (entered.status_code, entered.headers["location"]) == (303, "/")
    cookie = entered.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=strict" in cookie
    assert [one.status_code for one in after] == [200, 200]


def test_the_page_loads_nothing_from_elsewhere(run: Path) -> None:
    page, style, script = get(app_of(run), "/", "/watch.css", "/watch.js")
    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    for one in (page, style, script):
        assert "http://" not in one.text.replace("http://www.w3.org/2000/svg", "") and "https://" not in one.text


def test_a_taken_port_is_left_alone_and_one_that_was_asked_for_is_an_error() -> None:
    with server.listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=f"127.0.0.1:{port}: cannot listen there: .*in use"):
            server.listen("127.0.0.1", port)
    with pytest.raises(RunError, match="cannot listen there"):
        server.listen("no.such.host.invalid", 0)


def test_the_default_port_is_another_one_where_it_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with server.listen("127.0.0.1", 0) as taken:
        monkeypatch.setattr(server, "PORT", taken.getsockname()[1])
        with server.listen("127.0.0.1", None) as found:
            assert found.getsockname()[1] not in (0, server.PORT)
            assert server.address(found, "127.0.0.1", None) == f"http://127.0.0.1:{found.getsockname()[1]}/"
            assert server.address(found, "::1", None) == f"http://[::1]:{found.getsockname()[1]}/"
            anywhere = server.address(found, "0.0.0.0", "secret")
            assert anywhere == f"http://{socket.gethostname()}:{found.getsockname()[1]}/?token=secret"


def test_a_run_is_wanted(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch"]) == 2
    assert cli.main(["watch", str(tmp_path)]) == 1
    assert "no run found" in capsys.readouterr().err
    assert cli.main(["watch", str(run / "config.toml")]) == 2


def test_ctrl_c_ends_the_page_with_the_exit_code_of_every_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(server.uvicorn.Server, "run", interrupted)
    assert cli.main(["watch", str(run), "--port", "0"]) == 130
