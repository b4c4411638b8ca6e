"""builtin:tiny is made of the task's own characters, and refuses in a sentence a task that it cannot learn."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import MATH

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import TaskError
from streamppo.learner.model import tiny
from streamppo.tasks import warmup_data
from streamppo.tasks.library.arithmetic import ALPHABET
from streamppo.tasks.tokenizer import Tokenizer

LETTERS = [{"prompt": f"say {word}: ", "answer": word.upper()} for word in ("cat", "dog", "émeu", "fox")]


def learned(rows: Sequence[dict[str, Any]], folder: Path, *overrides: str) -> warmup_data.Lesson:
    """The lesson of a data set with these rows; builtin:tiny is taught for one step."""
    return warmup_data.prepare(config_of(rows, folder, *overrides))


def config_of(rows: Sequence[dict[str, Any]], folder: Path, *overrides: str) -> Config:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"task={{kind='data', data='{path}', held_out=0.5}}"
    return configfile.load(MATH, [data, "model.tiny.max_steps=1", *overrides])


def test_the_alphabet_is_every_character_of_prompts_and_answers_held_out_ones_too(tmp_path: Path) -> None:
    found = learned(LETTERS, tmp_path)
    assert found.alphabet == "".join(sorted(set("CATDOGÉMEUFOXcatdogémeufoxsay"))) + " :"
    assert len(found.problems) == 2


@pytest.mark.parametrize("kind", ["arithmetic", "calculator"])
def test_sums_are_written_in_the_characters_of_sums(kind: str) -> None:
    config = configfile.load(MATH, [f"task.kind={kind}"])
    assert warmup_data.prepare(config).alphabet == ALPHABET


def test_a_model_of_letters_reads_and_writes_them(
    tmp_path: Path, logged: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiny, "PROGRESS_S", 0.0)
    tiny.make(config_of(LETTERS, tmp_path), tmp_path / "model")
    tokenizer = Tokenizer(tmp_path / "model")
    for prompt in warmup_data.prepare(config_of(LETTERS, tmp_path)).problems:
        assert tokenizer.decode(tokenizer.encode(prompt)) == prompt.text
        assert tokenizer.decode(tokenizer.encode_turn(prompt.columns["answer"], "stop")) == prompt.columns["answer"]
    assert "supervised step 0/1" in logged.text


def of_length(count: int) -> dict[str, Any]:
    return {"prompt": "a" * count, "answer": "b"}


REFUSED = {
    "learns only from answers that are texts or numbers: the answer of the prompt 'a' is [2]": [
        {"prompt": "a", "answer": [2]}
    ],
    "learns only from answers that are texts or numbers: the answer of the prompt 'a' is ''": [
        {"prompt": "a", "answer": ""}
    ],
    "has no chat template": [{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}],
    "a prompt of 5000 tokens is longer than max_prompt_tokens (1024)": [of_length(5000)],
    "has 257 with its answer; lower max_prompt_tokens": [of_length(255)],
    "256 different characters at most, and the prompts and answers have 301": [
        {"prompt": chr(0x4E00 + n), "answer": "b"} for n in range(300)
    ],
    "half of a surrogate pair": [{"prompt": "\ud83d", "answer": "b"}],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_a_task_that_it_cannot_learn_is_refused(tmp_path: Path, sentence: str) -> None:
    with pytest.raises(TaskError) as refused:
        learned(REFUSED[sentence] * 2, tmp_path, "task.held_out=0")
    assert sentence in str(refused.value)


def test_the_longest_row_that_it_reads_is_as_long_as_it_says(tmp_path: Path) -> None:
    assert learned([of_length(254)], tmp_path, "task.held_out=0").alphabet == "ab"


def test_prompts_that_are_too_long_are_left_out_or_cut_as_the_task_says(tmp_path: Path) -> None:
    rows = [of_length(4), {"prompt": "xy" * 300 + "a", "answer": "b"}]
    short = ("task.held_out=0", "task.max_prompt_tokens=9")
    assert learned(rows, tmp_path, *short, "task.too_long=skip").alphabet == "ab"
    cut = learned(rows, tmp_path, *short, "task.too_long=truncate")
    assert {prompt.text for prompt in cut.problems} == {"aaaa", "xyxyxyxya"}
