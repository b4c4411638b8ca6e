"""A plausible mistake on the command line is answered with one sentence, and leaves nothing behind."""

import json
from pathlib import Path

import pytest
from conftest import MATH

from streamppo.cli import main
from streamppo.config import file as configfile

NUMBERS = "task={kind='data', data='numbers.jsonl', held_out=0}"
MISTAKES = {
    "data gsm8k --from gsm8k --to folder": "TaskError: folder: a folder; name a file",
    "data gsm8k --from gsm8k --to file/x.parquet": "TaskError: file/x.parquet: cannot be written",
    "data math --from latin --to x.parquet": "latin/train/algebra/1.json: not JSON: 'utf-8' codec",
    "inspect run": "run/journal.sqlite: missing",
    "inspect run --dead-letters": "run/journal.sqlite: missing",
    "inspect run --prompt 1": "run/journal.sqlite: missing",
    "replay run": "run/journal.sqlite: missing",
    "reward-test math.toml model.path=../models/nope": "the tokenizer of '../models/nope' cannot be loaded",
    f"reward-test math.toml {NUMBERS}": "builtin:tiny learns only from answers that are texts or numbers",
}


@pytest.mark.parametrize("command", MISTAKES)
def test_a_mistake_is_answered_with_a_sentence(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    for folder in ("folder", "gsm8k", "run", "latin/train/algebra"):
        Path(folder).mkdir(parents=True)
    Path("file").touch()
    Path("gsm8k", "train.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}))
    Path("latin", "train", "algebra", "1.json").write_text('{"problem": "é"}', encoding="latin-1")
    Path("numbers.jsonl").write_text('{"prompt": "1+1=", "answer": [2]}\n' * 2)
    Path("math.toml").write_text(MATH.read_text())
    configfile.save(configfile.load(MATH), Path("run"))
    before = sorted(Path().rglob("*"))
    assert main(command.split(maxsplit=2 if NUMBERS in command else -1)) == 1
    assert MISTAKES[command] in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before


def test_a_run_of_an_earlier_version_is_refused_by_that_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    for command in ("resume", "replay", "inspect"):
        assert main([command, str(tmp_path)]) == 1
        assert f"{tmp_path}: made by an earlier version of streamppo" in capsys.readouterr().err
