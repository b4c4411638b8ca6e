"""A run's folder from a stranger: commands that read it end with a result or a sentence. No exception leaves them,
nothing is executed, and every file is read in bounded time.
"""

import asyncio
import contextlib
import json
import os
import pickle
import random
import shutil
import socket
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NoReturn

import httpx
import msgspec
import pytest
import strange_values
from learner_case import SMALL
from report_case import ALPHABET, run_folder
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo import cli, loop
from streamppo.commands import replay
from streamppo.commands.look.watching import run_tail, server
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import RunError
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import character_tokenizer

LOOKS = {
    "summary": ["summary", "RUN"],
    "summary as JSON": ["summary", "RUN", "--json"],
    "list": ["list", "--runs", "RUNS"],
    "report": ["report", "RUN"],
    "inspect": ["inspect", "RUN"],
    "inspect a batch": ["inspect", "RUN", "--update", "3"],
    "inspect a prompt": ["inspect", "RUN", "--prompt", "0"],
    "inspect what failed": ["inspect", "RUN", "--dead-letters"],
    "inspect the time": ["inspect", "RUN", "--time"],
    "trace": ["trace", "RUN", "--to", "TO"],
    "export": ["export", "RUN", "--version", "3", "--to", "TO"],
    "replay": ["replay", "RUN"],
    "resume": ["resume", "RUN"],
    "bundle": ["bundle", "RUN", "--update", "4", "--to", "BUNDLE"],
    "fork": ["fork", "RUN", "--at", "3", "--name", "forked", "--runs", "FORKS"],
    "bisect": ["bisect", "RUN", "--metric", "entropy", "--below", "9"],
    "try": ["try", "RUN", "--version", "3", "--prompt", "0", "-n", "1"],
    "bisect what was changed": ["bisect", "RUN", "--metric", "entropy", "--below", "0", "--set", "learner.lr=1e-3"],
    "verify": ["verify", "RUN", "--updates", "0"],
    "verify an update": ["verify", "RUN", "--updates", "1"],
}
PAGE = ["/", "/watch.js", "/sections", "/batch", "/batch/3", "/batch/3/0", "/batch/9/9"]
"""What a page of `watch` asks for."""
COMPARED = "/sections?with=runs/math"
BEGUN = "processes would start here"
ENDS = {
    "replay": BEGUN,
    "resume": BEGUN,
    "bundle": BEGUN,
    "fork": BEGUN,
    "try": BEGUN,
    "bisect what was changed": BEGUN,
    "verify": "the chain of versions is broken at version 0",
    "verify an update": f"cannot be replayed: {BEGUN}",
    "export": "no checkpoint yet",
    "inspect the time": "no process has reported",
}
"""This run was made without processes: it has no checkpoint, no phases and no chain."""
FILES = ["config.toml", "metrics.jsonl", "journal.sqlite", "journal.tip", "summary.json", "inputs.json", "archive"]
FILES += ["model", "model/tokenizer.json"]
DEEP = 100_000
PLANTED: dict[str, bytes] = {
    "nothing": b"",
    "JSON that is nested for ever": b"[" * DEEP,
    "TOML that is nested for ever": b"a = " + b"[" * DEEP,
    "a pickle": b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x12: > $STREAMPPO_RAN\x85R.",
    "numbers beyond all": b'{"update": 1e999, "wall_s": -1e999, "engines": 99999999999999999999999999999}\n',
    "orders to a terminal": b'{"end": "\\u001b]0;x\\u0007\\u202e", "update": "\\u001b[2J"}\n',
    "half a surrogate": b'{"end": "\\ud800", "part": "\\udfff"}\n',
    "zeros": bytes(4096),
    "text that is not UTF-8": b'{"end": "\xb4", "path": "\xf0", "x\xff": 1}\n',
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made") / "math"


@pytest.fixture
def run(made: Path, tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Path:
    # A resume comes as far as the start of processes, and replay too.
    monkeypatch.setattr(loop, "ray_session", begun)
    monkeypatch.setattr(replay, "started_ray", begun)
    monkeypatch.setattr(run_tail, "JOURNAL_S", 0.0)
    monkeypatch.setenv("STREAMPPO_RAN", str(tmp_path / "ran"))
    if not made.exists():
        run_folder(made, math_config(), updates=4)
        vocabulary = len(character_tokenizer(ALPHABET))
        Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "vocab_size": vocabulary})).save_pretrained(made / "model")
        # Journals of the tests' runs lack the first rows of a driver.
        with closing(Journal(made / "journal.sqlite")) as journal:
            journal.configure(0, msgspec.msgpack.encode(configfile.load(made / configfile.CONFIG)))
        assert cli.main(["resume", str(made)]) == RunError.exit_code
    (tmp_path / "whole").mkdir()
    (tmp_path / "whole" / "math").symlink_to(made)
    return shutil.copytree(made, tmp_path / "runs" / "math")


def begun(*_: object, **__: object) -> NoReturn:
    raise RunError(BEGUN)


def look(run: Path, arguments: list[str]) -> int:
    places = {"RUN": str(run), "RUNS": str(run.parent), "TO": str(run.parent.parent / "to")}
    places["FORKS"], places["BUNDLE"] = str(run.parent.parent / "forks"), str(run.parent.parent / "1.safetensors")
    return cli.main([places.get(one, one) for one in arguments])


def asked(run: Path) -> dict[str, httpx.Response]:
    """Every answer of the page about `run`, and of a page that compares another run with it."""

    async def all_of(page: Path, others: list[Path], paths: list[str]) -> dict[str, httpx.Response]:
        transport = httpx.ASGITransport(server.application(page, others, None))
        async with httpx.AsyncClient(verify=False, transport=transport, base_url="http://127.0.0.1") as client:
            return {path: await client.get(path) for path in paths}

    whole = run.parent.parent / "whole" / "math"
    return asyncio.run(all_of(run, [], PAGE)) | asyncio.run(all_of(whole, [run], [COMPARED]))


def places(run: Path, name: str) -> list[Path]:
    """Every file of that name, or in the folder of that name."""
    at = run / name
    return sorted(one for one in at.rglob("*") if one.is_file()) if at.is_dir() else [at]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOOKS)
def test_the_whole_folder_is_looked_at(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, told = look(run, LOOKS[name]), "".join(capsys.readouterr())
    assert code == 0 or (name in ENDS and ENDS[name] in told), told


def test_the_whole_folder_is_a_page(run: Path) -> None:
    answers = asked(run)
    assert [path for path, one in answers.items() if one.status_code != 200] == ["/batch/9/9"]
    assert answers["/batch/3/0"].json() and answers["/sections?with=runs/math"].json()["sections"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", PLANTED)
def test_a_file_with_other_content_is_shown_or_told_in_a_sentence(
    run: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in places(run, name)[:2]:
        file.write_bytes(PLANTED[content])
    _look_at_all(run, capsys)


NESTED = b'{"a": ' + b"[" * DEEP + b"]" * DEEP + b"}"
"""JSON of the right kind whose depth is beyond any reader."""


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"),
        *("adapter_config.json", "model.safetensors.index.json", "model.safetensors", "special_tokens_map.json"),
    ],
)
def test_a_file_of_the_model_that_is_nested_for_ever_is_told_in_a_sentence(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    header = len(NESTED).to_bytes(8, "little") if name.endswith(".safetensors") else b""
    if "index" in name:
        (run / "model" / "model.safetensors").unlink()
    (run / "model" / name).write_bytes(header + NESTED)
    code, told = look(run, LOOKS["resume"]), capsys.readouterr().err
    assert code and "Traceback" not in told and (BEGUN in told or name in told or "tokenizer" in told), told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inputs.json", "summary.json"])
def test_a_file_of_the_run_that_is_nested_for_ever_is_told_in_a_sentence(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / name).write_bytes(NESTED.replace(b'{"a"', b'{"a": {"path": "x", "files": {}, "b"') + b"}")
    _look_at_all(run, capsys)


ROWS = {
    "rows.jsonl": NESTED,
    "row.jsonl": b'{"prompt": [{"role": "user", "content": "1"}], "tools": "' + b"[" * DEEP + b'", "answer": "1"}',
    "saved/state.json": NESTED,
    "other/state.json": b'{"_data_files": 3}',
}


@pytest.mark.parametrize("name", ROWS)
def test_data_that_are_nested_for_ever_are_told_in_a_sentence(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run.parent.parent / name
    file.parent.mkdir(exist_ok=True)
    (file.parent / "dataset_info.json").write_text("{}")
    file.write_bytes(ROWS[name] + b"\n")
    data = file.parent if file.name == "state.json" else file
    assert cli.main(["check", str(run / "config.toml"), f"task={{ data = {json.dumps(str(data))} }}"]) == 1
    told = capsys.readouterr()
    assert "Traceback" not in told.err and file.name in told.out + told.err


OTHERS = ["journal.sqlite-wal", "journal.sqlite-shm", "remote.address", "scale.json", "consent", "report.html"]
OTHERS += ["replays/1.json", "checkpoints", "model/generation_config.json", "model/tokenizer_config.json"]
OTHERS += ["model/model.safetensors.index.json", "model/adapter_config.json", "model/chat_template.jinja"]
INSIDE = ["model/config.json", "model/tokenizer.json", "model/model.safetensors", "archive/*.zip"]
"""Files that a run has, or may have, beside those of `FILES`."""
STRANGE = ("a pipe", "a device without end", "a socket", "a link to itself", "a folder")


def put(kind: str, place: Path) -> None:
    """Put a pipe, a device or the like at `place`."""
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    match kind:
        case "a pipe":
            os.mkfifo(place)
        case "a device without end":
            place.symlink_to("/dev/zero")
        case "a socket":
            with socket.socket(socket.AF_UNIX) as bound, contextlib.chdir(place.parent):
                bound.bind(place.name)
        case "a link to itself":
            place.symlink_to(place)
        case _:
            place.mkdir()


@pytest.mark.sampled(1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "name, kind",
    [
        pytest.param(name, kind, marks=() if kind == STRANGE[number % 2] else pytest.mark.slow)
        for number, name in enumerate([*FILES[:-3], *INSIDE, *OTHERS])
        for kind in STRANGE
    ],
)
def test_nobody_waits_at_what_is_no_file(run: Path, name: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = sorted(run.glob(name)) if "*" in name else [run / name]
    for place in found[-1:]:
        put(kind, place)
    _look_at_all(run, capsys)


@pytest.mark.sampled(1)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", [*FILES[:-3], *INSIDE[:3], *OTHERS[:6]])
def test_no_look_and_no_resume_writes_through_a_link(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, place = run.parent.parent / "theirs", run / name
    content = place.read_bytes() if place.exists() else b"theirs\n" * 1000
    theirs.write_bytes(content)
    place.unlink(missing_ok=True)
    place.symlink_to(theirs)
    _look_at_all(run, capsys)
    assert theirs.read_bytes() == content


@pytest.mark.sampled(3)
@pytest.mark.timeout(60)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", [*FILES[:-3], "archive/*.zip", "consent", "checkpoints"])
def test_a_hollow_file_takes_no_memory(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    place = sorted(run.glob(name))[-1] if "*" in name else run / name
    if name == "checkpoints":
        place = place / "00000003" / "manifest.json"
        place.parent.mkdir(parents=True, exist_ok=True)
    place.touch()
    os.truncate(place, 2**40)
    _look_at_all(run, capsys)


@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("name", ["model/tokenizer.json", "journal.sqlite"])
def test_a_hollow_file_that_a_library_reads_is_refused(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.truncate(run / name, 2**40)
    for words in (["inspect", "RUN"], ["watch", "RUN"], ["resume", "RUN"]):
        assert look(run, words) == 1
        assert f"{run / name}: a sparse file" in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_folder_with_a_pipe_is_not_evaluated(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put("a pipe", run / "journal.sqlite-wal")
    assert look(run, ["eval", "RUN"]) == 1
    assert "journal.sqlite-wal: neither a file nor a folder" in capsys.readouterr().err


# Each draw changes one file of each name: more than 500 mutations in all.
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.slow) for n in range(5, 75))])
def test_random_mutations_are_shown_or_told_in_a_sentence(
    run: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    for name in FILES:
        file = rng.choice(places(run, name))
        if file.exists():
            file.write_bytes(mutated(file.read_bytes(), rng))
    _look_at_all(run, capsys)


# Every file is whole, and its checksums fit.
@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 40))])
@pytest.mark.parametrize("kind", strange_values.DRAWS)
@pytest.mark.usefixtures("little_memory")
def test_values_that_no_run_writes_are_shown_or_told_in_a_sentence(
    run: Path, kind: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    strange_values.DRAWS[kind](run, random.Random(f"{kind} {seed}"))
    _look_at_all(run, capsys)


@pytest.mark.sampled(1)
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("little_memory")
@pytest.mark.parametrize("version", [10**9, 2**53, 2**63 - 2])
@pytest.mark.parametrize("kind", strange_values.FAR)
def test_a_version_far_beyond_all_others_is_shown_or_told_in_a_sentence(
    run: Path, kind: str, version: int, capsys: pytest.CaptureFixture[str]
) -> None:
    strange_values.FAR[kind](run, version)
    _look_at_all(run, capsys)


def _look_at_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, answer in asked(run).items():
        assert answer.status_code in (200, 404), (path, answer.text)
    for arguments in LOOKS.values():
        code = look(run, arguments)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err and "\x1b]" not in shown.out + shown.err
        assert code == 0 or (shown.out + shown.err).strip(), arguments
    assert not (run.parent.parent / "ran").exists(), "a pickle was obeyed"


@pytest.mark.usefixtures("run")
def test_the_pickle_leaves_a_file_where_it_is_obeyed(tmp_path: Path) -> None:
    pickle.loads(PLANTED["a pickle"])
    assert (tmp_path / "ran").exists()


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, double or insert a few bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.choice(["flip", "cut", "insert", "double"]):
            case "flip" if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case "cut":
                del changed[at : at + rng.randint(1, 64)]
            case "insert":
                changed[at:at] = rng.randbytes(rng.randint(1, 16))
            case _:
                changed[at:at] = changed[:at][-64:]
    return bytes(changed)
