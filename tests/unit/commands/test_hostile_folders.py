"""A run's folder from a stranger: commands that look at it end with what they found or with a sentence.

No exception leaves them, nothing is executed, and whatever is in a file, it is looked at in bounded time.
"""

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from report_case import run_folder

from streamppo import cli, loop
from streamppo.config.sections import Config

LOOKS = {
    "summary": ["summary", "RUN"],
    "summary as JSON": ["summary", "RUN", "--json"],
    "list": ["list", "--runs", "RUNS"],
    "report": ["report", "RUN"],
    "inspect": ["inspect", "RUN"],
    "inspect a batch": ["inspect", "RUN", "--update", "3"],
    "export": ["export", "RUN", "--version", "3"],
    "replay": ["replay", "RUN"],
    "resume": ["resume", "RUN"],
}
FILES = ["config.toml", "metrics.jsonl", "journal.sqlite", "journal.tip", "summary.json", "archive", "model"]
DEEP = 100_000
PLANTED: dict[str, bytes] = {
    "nothing": b"",
    "JSON that is nested for ever": b"[" * DEEP,
    "TOML that is nested for ever": b"a = " + b"[" * DEEP,
    "a pickle": b"\x80\x04\x95\x1c\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x8c\x06system\x93\x8c\x05false\x85R.",
    "numbers beyond all": b'{"update": 1e999, "wall_s": -1e999, "engines": 99999999999999999999999999999}\n',
    "orders to a terminal": b'{"end": "\\u001b]0;x\\u0007\\u202e", "update": "\\u001b[2J"}\n',
    "half a surrogate": b'{"end": "\\ud800", "part": "\\udfff"}\n',
    "zeros": bytes(4096),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("made") / "math"


@pytest.fixture
def run(made: Path, tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Path:
    # A resume comes as far as the start of processes.
    monkeypatch.setattr(loop, "run", lambda *_, **__: 0)
    if not made.exists():
        run_folder(made, math_config(), updates=4)
    return shutil.copytree(made, tmp_path / "runs" / "math")


def look(run: Path, arguments: list[str]) -> int:
    places = {"RUN": str(run), "RUNS": str(run.parent)}
    return cli.main([places.get(one, one) for one in arguments])


def places(run: Path, name: str) -> list[Path]:
    """Every file of that name, or in the folder of that name."""
    at = run / name
    return sorted(one for one in at.rglob("*") if one.is_file()) if at.is_dir() else [at]


@pytest.mark.parametrize("name", LOOKS)
def test_the_whole_folder_is_looked_at(run: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = look(run, LOOKS[name])
    # This run was made without a checkpoint, the digests of its versions and a model's config.json.
    assert code == 0 or name in ("export", "replay", "resume"), capsys.readouterr().err


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("content", PLANTED)
def test_a_file_with_other_content_is_shown_or_told_in_a_sentence(
    run: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in places(run, name)[:2]:
        file.write_bytes(PLANTED[content])
    _look_at_all(run, capsys)


# Each draw changes one file of each name: 7 mutations, 105 by default and 525 in all.
@pytest.mark.parametrize("seed", [*range(15), *(pytest.param(n, marks=pytest.mark.slow) for n in range(15, 75))])
def test_random_mutations_are_shown_or_told_in_a_sentence(
    run: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = random.Random(seed)
    for name in FILES:
        file = rng.choice(places(run, name))
        if file.exists():
            file.write_bytes(_mutated(file.read_bytes(), rng))
    _look_at_all(run, capsys)


def _look_at_all(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in LOOKS.values():
        code = look(run, arguments)
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err and "\x1b]" not in shown.out + shown.err
        assert code == 0 or (shown.out + shown.err).strip(), arguments


def _mutated(data: bytes, rng: random.Random) -> bytes:
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
