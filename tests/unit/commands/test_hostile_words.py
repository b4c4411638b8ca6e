"""Words of strangers reach no terminal as they are: one run with them everywhere, and every command that prints.

They are in the folder's name, file names, configuration, model, rows, rewards, journal, archive and lines.
"""

import json
import os
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import report_case
import tomli_w
import uvicorn
from conftest import trajectory
from learner_case import SMALL
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo import cli, loop
from streamppo.commands import replay
from streamppo.commands.look.summary import current_summary
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import RunError
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.telemetry import metrics_file
from streamppo.telemetry.live.display import empty_state
from streamppo.telemetry.live.view import final_rows, view
from streamppo.telemetry.summary import queue_totals
from streamppo.terminal import HARMFUL
from streamppo.types import Failure, Trajectory

FORGED = "streamppo: forged"
ORDERS = f"\x1b[2J\x1b]0;t\x07\x9b2J\x90\x00\r{FORGED}\n{FORGED}\u2028{FORGED}\u202egpj\u2066\u200f\ufeff\U000e0041"
"""Orders to a terminal, forged lines, letters that turn the direction of writing, letters without a shape."""
LONG = "w" * 50_000
WORDS = f"{ORDERS} {LONG}"
HALF = "\ud83d"
"""Half a pair of surrogates: JSON can have it, TOML and the journal cannot."""
NAME = f"{ORDERS}.".replace("\0", "").replace("/", "")
LETTERS = "\x1b\u202e\n\x9b\r\u2028"
MOST = 2_000_000
"""Characters that a command prints at most: a word of a stranger fills no disk."""
REWARDS = """
import logging, sys
from streamppo.types import Reward
WORDS = {words!r}
# Lines that are printed where the module is imported, in each of the ways.
print(f"printed at the import {{WORDS}}\\n{{WORDS}}")
sys.stdout.buffer.write(f"bytes at the import {{WORDS}}\\n".encode(errors="replace"))
sys.stderr.write(f"errors at the import {{WORDS}}\\n")
log = logging.Logger("theirs")
log.addHandler(logging.StreamHandler())
log.warning("a log at the import %s", WORDS)
print(f"no end at the import {{WORDS}}", end="")
class Said:
    def __repr__(self):
        return WORDS
def score(trajectory, **columns):
    # Lines that a reward prints are its own.
    print(WORDS.replace("\\n", " ").encode(errors="replace").decode())
    match len(trajectory.prompt) % 4:
        case 0:
            raise ValueError(WORDS)
        case 1:
            return Reward(score=1.0, components={{WORDS: 1.0}}, explanation=WORDS)
        case 2:
            return Said()
    return {{"score": 1.0, WORDS: 1.0}}
"""
REST = {"verdict": WORDS, "engines": None, "checksum": WORDS, "seed": 1, "versions": {WORDS: WORDS}}
"""What a summary has beside numbers of lines and of the queue."""
REACHED = {
    **dict.fromkeys(("summary", "list"), "forged"),
    **{"inspect": "completion", "inspect a prompt": "failed: reward", "report": "report.html", "eval": "accuracy"},
    **dict.fromkeys(("resume with trust", "resume with changes", "run"), "processes would start here"),
    **dict.fromkeys(("reward-test", "reward-test of given words"), "mean reward"),
    **dict.fromkeys(("resume", "replay", "bundle", "fork", "bisect", "try", "verify"), "--trust"),
    **{"check": "settings", "init": "begin with", "data": "1 rows", "eval as JSON": '"reasons"'},
}
"""Words without which a command has not come as far as it is to."""
IMPORTS = ("run", "check", "resume with changes", "init", "reward-test", "eval", "eval as JSON")
"""Commands that import the reward's module themselves."""
PRINTED = ("printed", "bytes", "errors", "a log", "no end")
COMMANDS = {
    "summary": ["summary", "RUN"],
    "summary as JSON": ["summary", "RUN", "--json"],
    "list": ["list", "--runs", "RUNS"],
    "report": ["report", "RUN"],
    "inspect": ["inspect", "RUN"],
    "inspect an update": ["inspect", "RUN", "--update", "1"],
    "inspect a prompt": ["inspect", "RUN", "--prompt", "0"],
    "inspect what failed": ["inspect", "RUN", "--dead-letters"],
    "inspect the time": ["inspect", "RUN", "--time"],
    "trace": ["trace", "RUN", "--to", "TRACE"],
    "export": ["export", "RUN", "--to", "TO"],
    "scale": ["scale", "RUN", "--rollouts", "2"],
    "watch": ["watch", "RUN", "--port", "0"],
    "replay": ["replay", "RUN"],
    "bundle": ["bundle", "RUN", "--update", "1"],
    "fork": ["fork", "RUN", "--at", "1", "--runs", "RUNS"],
    "bisect": ["bisect", "RUN", "--metric", "reward", "--above", "0"],
    "try": ["try", "RUN", "--version", "1", "--prompt", "0"],
    "verify": ["verify", "RUN"],
    "resume": ["resume", "RUN"],
    "resume with trust": ["resume", "RUN", "--trust"],
    "resume with changes": ["resume", "RUN", "--trust", "OVERRIDE"],
    "a folder that is not there": ["summary", "MISSING"],
    "an option that is not there": ["summary", "RUN", f"--{ORDERS}"],
    "a value that is none": ["run", "CONFIG", "OVERRIDE", "learner.lr=WORDS"],
    "dry run": ["run", "CONFIG", "--dry-run"],
    "run": ["run", "CONFIG", "--runs", "RUNS"],
    "check": ["check", "CONFIG"],
    "reward-test": ["reward-test", "CONFIG", "--n", "8"],
    "reward-test of given words": ["reward-test", "CONFIG", "--completions", "GIVEN"],
    "data": ["data", "gsm8k", "--from", "DATA", "--to", "PARQUET"],
    "data of other rows": ["data", "hellaswag", "--from", "DATA", "--to", "PARQUET"],
    "init": ["init", "BEGUN", "--model", "MODEL", "--data", "ROWS", "--reward", "REWARDS"],
    "eval": ["eval", "MODEL", "CONFIG", "--samples", "0"],
    "eval as JSON": ["eval", "MODEL", "CONFIG", "--samples", "0", "--json"],
    "eval of a run": ["eval", "RUN"],
}


def is_harmless(text: str) -> bool:
    """No character but the newlines of ours is one that a terminal obeys, and no line is another's."""
    obeyed = {one for one in text if one != "\n" and unicodedata.category(one) in HARMFUL}
    return not obeyed and not any(line.startswith(FORGED) for line in text.splitlines())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where everything lies that the commands are given."""
    place = tmp_path_factory.mktemp("made")
    before = Path.cwd()
    os.chdir(place)
    with pytest.MonkeyPatch.context() as patch:
        _make(place, patch)
    yield place
    os.chdir(before)


def _make(place: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(report_case, "ALPHABET", report_case.ALPHABET + LETTERS)
    patch.setattr(report_case, "_tokens", lambda text: [3 + report_case.ALPHABET.index(one) for one in _strange(text)])
    patch.setattr(report_case, "trajectory", _strange_trajectory)
    patch.setattr(report_case, "Failure", _strange_failure)
    rewards = place / f"re{NAME}wards.py"
    rewards.write_text(REWARDS.format(words=WORDS + HALF))
    rows = [
        {"prompt": f"{ORDERS}{'1' * number}", "answer": WORDS, WORDS: ORDERS, "completion": WORDS}
        for number in range(40)
    ]
    (place / f"{NAME}rows.jsonl").write_text("".join(json.dumps({**row, "half": HALF}) + "\n" for row in rows))
    (place / "data").mkdir()
    solved = {"question": WORDS, "answer": f"{WORDS} #### {WORDS}", WORDS: WORDS}
    for split in ("train", "test", "hellaswag_train"):
        (place / "data" / f"{split}.jsonl").write_text(json.dumps(solved) + "\n")
    model = place / f"{NAME}model"
    tokenizer = character_tokenizer(report_case.ALPHABET)
    tokenizer.save_pretrained(model)
    Qwen2ForCausalLM(Qwen2Config(**{**SMALL, "vocab_size": len(tokenizer)})).save_pretrained(model)
    config = {
        "model": {"path": str(model)},
        "updates": 4,
        "task": {"data": str(place / f"{NAME}rows.jsonl"), "columns": {"more": WORDS}, "max_prompt_tokens": 1000},
        "reward": {"scorers": {ORDERS: {"kind": "function", "function": f"{rewards}:score"}}},
        "queue": {"batch_size": 4, "samples_per_prompt": 1, "max_lag": 1},
        "rollout": {"max_tokens": 4, "slots": 4},
        "evaluation": {"prompts": 2},
    }
    (place / "config.toml").write_text(tomli_w.dumps(config))
    loaded = configfile.load(place / "config.toml")
    run = place / "runs" / NAME
    run.parent.mkdir()
    report_case.run_folder(run, loaded, updates=4)
    shutil.copytree(model, run / "model", dirs_exist_ok=True)
    _write_lines(run)


def _strange(text: str) -> str:
    """As many letters, with those of a stranger among them."""
    return {"1<2": LETTERS[:3], "1+1=": f"{LETTERS[3:]}="}[text]


def _strange_trajectory(tokens: Sequence[int], **columns: object) -> Trajectory:
    made = trajectory(tokens, **columns)  # pyright: ignore[reportArgumentType]
    from msgspec import structs

    return structs.replace(made, actor=ORDERS, components={WORDS: 1.0}, explanation=WORDS)


def _strange_failure(**columns: object) -> Failure:
    return Failure(**{**columns, "reason": WORDS, "actor": ORDERS})  # pyright: ignore[reportArgumentType]


def _write_lines(run: Path) -> None:
    """Add to the run's lines those of a stranger, and a summary of them."""
    file = run / metrics_file.METRICS
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    lines = [{**line, f"reward_{WORDS}": 1.0, HALF: HALF} if "update" in line else line for line in lines]
    told = [
        {"restart": WORDS, "wall_s": 1.0, "reason": WORDS},
        {"restart": "rollout", "wall_s": 1.0, "reason": WORDS + HALF},
        {"phases": WORDS, "spent": {WORDS: [1, 1.0, 1.0]}, "wall_s": 2.0},
        {"end": WORDS + HALF, "wall_s": 9.0},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in [*lines, *told]))
    (run / "summary.json").write_text(
        json.dumps({**current_summary(run), **queue_totals(None), "outcome": WORDS, **REST})
    )


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise RunError(f"processes would start here, and one says {WORDS}")

    monkeypatch.setattr(loop, "ray_session", refuse)
    monkeypatch.setattr(replay, "started_ray", refuse)
    monkeypatch.setattr(uvicorn.Server, "run", lambda _, sockets: [one.close() for one in sockets])


@pytest.mark.sampled(14)
@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("name", COMMANDS)
def test_no_word_of_a_stranger_is_obeyed(made: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    given = {
        **{
            "RUN": f"runs/{NAME}",
            "RUNS": "runs",
            "MISSING": NAME,
            "TO": "to",
            "TRACE": f"{NAME}.json",
            "CONFIG": "config.toml",
        },
        **{"OVERRIDE": "evaluation.every=3", "DATA": "data", "BEGUN": "begun"},
        **{"PARQUET": f"{NAME}.parquet", "MODEL": f"{NAME}model", "ROWS": f"{NAME}rows.jsonl"},
        **{
            "GIVEN": f"{NAME}rows.jsonl",
            "REWARDS": f"re{NAME}wards.py:score",
            "learner.lr=WORDS": f"learner.lr={WORDS}",
        },
    }
    for module in [one for one in sys.modules if one.startswith("streamppo.tasks.plugins.")]:
        del sys.modules[module]
    code = cli.main([given.get(one, one) for one in COMMANDS[name]])
    told = capfd.readouterr()
    assert "Traceback" not in told.err
    assert is_harmless(told.out), ascii(told.out[:5000])
    assert is_harmless(told.err), ascii(told.err[:5000])
    assert len(told.out) + len(told.err) < MOST
    assert code == 0 or told.err.strip() or told.out.strip()
    assert REACHED.get(name, "") in told.out + told.err
    for line in (told.out + told.err).splitlines():
        assert " at the import" not in line or re.match(r"prints: |reward .*?: ", line), ascii(line[:300])
    if name in IMPORTS:
        assert all(f"prints: {one} at the import" in told.out + told.err for one in PRINTED)
    if name.startswith("inspect"):
        assert LONG[:5_000] not in told.out, "a word of a stranger is shown whole"
    if "JSON" in name:
        assert json.loads(told.out)


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
def test_the_view_on_a_terminal_obeys_no_word(
    made: Path, size: tuple[int, int], math_config: Callable[..., Config]
) -> None:
    state = empty_state(configfile.load(made / "config.toml"), made / "runs" / NAME)
    for line in metrics_file.read(made / "runs" / NAME):
        state.add(line)
    state.warn(WORDS + HALF)
    state.doing = WORDS
    for row in [*view(state, *size), *final_rows(state, size[0])]:
        assert is_harmless(row.plain) and "\n" not in row.plain
