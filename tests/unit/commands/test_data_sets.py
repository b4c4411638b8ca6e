"""Data sets in their original layouts, tiny, become parquet files that a task reads."""

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from config_case import one_source

from streamppo.cli import main
from streamppo.config.task import GymTask
from streamppo.errors import TaskError
from streamppo.tasks import task
from streamppo.tasks.library import gym
from streamppo.types import Message, Prompt, ScoredText


def prepared(tmp_path: Path, name: str, split: str = "train", **how: Any) -> list[Prompt]:
    to = tmp_path / "out" / f"{name}.parquet"
    code = main(["data", name, "--from", str(tmp_path), "--to", str(to), "--split", split])
    assert code == 0
    built = task.build(one_source(data=str(to), held_out=0.0, **how), 1)
    assert built.sources() == {name}
    return sorted(built.training, key=lambda prompt: prompt.text)


def jsonl(path: Path, *rows: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_gsm8k(tmp_path: Path) -> None:
    solution = "She sold 48/2 = <<48/2=24>>24.\n#### 1,072"
    jsonl(tmp_path / "grade_school_math" / "data" / "test.jsonl", {"question": "How many?", "answer": solution})
    (prompt,) = prepared(tmp_path, "gsm8k", "test")
    assert prompt.text == "How many?"
    assert prompt.columns == {"data_source": "gsm8k", "answer": "1072", "solution": solution}


def test_math(tmp_path: Path) -> None:
    for number, subject in enumerate(("algebra", "geometry")):
        path = tmp_path / "train" / subject / f"{number}.json"
        path.parent.mkdir(parents=True)
        row = {
            "problem": f"p{number}",
            "level": "Level 5",
            "type": subject,
            "solution": rf"so $\boxed{{\frac{number}{{2}}}}$",
        }
        path.write_text(json.dumps(row))
    first, second = prepared(tmp_path, "math")
    assert (first.text, first.columns["answer"], first.columns["subject"]) == ("p0", r"\frac0{2}", "algebra")
    assert (second.columns["level"], second.columns["answer"]) == ("Level 5", r"\frac1{2}")


def test_hellaswag(tmp_path: Path) -> None:
    row = {
        "ind": 24,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he",
        "ctx": "A man is sitting on a roof. he",
        "split": "val",
        "split_type": "indomain",
        "label": 3,
        "endings": ["sleeps.", "sings.", "jumps.", "starts pulling up roofing."],
        "source_id": "activitynet~v_-JhWjGDPHMY",
    }
    jsonl(tmp_path / "data" / "hellaswag_val.jsonl", row)
    (prompt,) = prepared(tmp_path, "hellaswag", "test")
    assert prompt.columns["answer"] == "D"
    assert prompt.text.startswith("Roof shingle removal: A man is sitting on a roof. he\n\nA. sleeps.\nB. sings.")


HUB: dict[str, tuple[list[str], dict[str, Any], tuple[str, object]]] = {
    "gsm8k": (
        ["main/train-00000-of-00001.parquet"],
        {"question": "How many?", "answer": "#### 72"},
        ("How many?", "72"),
    ),
    "math": (
        ["algebra/train-00000-of-00001.parquet", "geometry/train-00000-of-00001.parquet"],
        {"problem": "1+1?", "level": "Level 1", "type": "Algebra", "solution": r"\boxed{2}"},
        ("1+1?", "2"),
    ),
    "hellaswag": (
        ["data/train-00000-of-00001.parquet"],
        {"ind": 4, "activity_label": "A", "ctx": "he", "endings": ["a", "b"], "split": "train", "label": "1"},
        ("A: he\n\nA. a\nB. b\n\nWhich ending fits? Give its letter.", "B"),
    ),
}


@pytest.mark.parametrize("name", HUB)
def test_a_copy_from_the_hub_is_converted_too(tmp_path: Path, name: str) -> None:
    files, row, (text, answer) = HUB[name]
    # The second configuration of gsm8k has the same problems.
    for file in [*files, "socratic/train-00000-of-00001.parquet"] if name == "gsm8k" else files:
        path = tmp_path / file
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    prompts = prepared(tmp_path, name)
    assert [(prompt.text, prompt.columns["answer"]) for prompt in prompts] == [(text, answer)] * len(files)


@pytest.mark.parametrize("name", HUB)
def test_a_folder_with_neither_layout_says_what_it_may_be(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("nothing")
    assert main(["data", name, "--from", str(tmp_path), "--to", str(tmp_path / "to.parquet")]) != 0
    assert "neither the original " in (said := capsys.readouterr().err) and "nor a copy from the hub: " in said


def test_full_hh_rlhf(tmp_path: Path) -> None:
    row = {
        "prompt": "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: And\nmore?\n\nAssistant:",
        "response": " Yes.",
        "chosen": " Yes.",
        "rejected": " No.",
    }
    jsonl(tmp_path / "data" / "train.jsonl", row)
    (prompt,) = prepared(tmp_path, "full_hh_rlhf", answer="chosen")
    assert prompt.messages == (
        Message(role="user", content="Hi"),
        Message(role="assistant", content="Hello."),
        Message(role="user", content="And\nmore?"),
    )
    assert (prompt.columns["answer"], prompt.columns["rejected"]) == ("Yes.", "No.")


@pytest.mark.parametrize("name", ["gsm8k", "math", "hellaswag", "full_hh_rlhf"])
def test_a_folder_of_something_else_is_an_error(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    jsonl(tmp_path / "other.jsonl", {"x": 1})
    assert main(["data", name, "--from", str(tmp_path), "--to", str(tmp_path / "x.parquet")]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    assert not (tmp_path / "x.parquet").exists()


def gym_score(prompt: Prompt, completion: str) -> float:
    text = ScoredText(prompt=prompt.text, completion=completion, finish="stop", num_tokens=1)
    return gym.score(text, **{name: prompt.columns[name] for name in ("dataset", "parameters", "entry")})


def test_reasoning_gym_makes_problems_and_scores_them() -> None:
    pytest.importorskip("reasoning_gym")
    config = GymTask(dataset="chain_sum", size=20, held_out=0.25, parameters={"max_digits": 2})
    built, again = task.build(config, 7), task.build(config, 7)
    assert (len(built.training), len(built.held_out(100))) == (15, 5)
    prompt = built.prompt(3)
    assert prompt == again.prompt(3)
    assert gym_score(prompt, prompt.columns["answer"]) == 1.0
    assert gym_score(prompt, "no idea") < 0.1
    with pytest.raises(TaskError, match="cannot be made"):
        task.build(GymTask(dataset="no_such"), 1)


@pytest.mark.parametrize(
    "dataset",
    [
        "rearc",  # compares tuples
        "knights_knaves",  # has texts of numpy in its entries
        "codeio",  # and numbers
        "isomorphic_strings",  # makes another problem of the same seed in another process
    ],
)
def test_right_answers_to_reasoning_gym_are_right(dataset: str) -> None:
    pytest.importorskip("reasoning_gym")
    built = task.build(GymTask(dataset=dataset, size=4, held_out=0.0), 5)
    for number in range(4):
        prompt = built.prompt(number)
        assert gym_score(prompt, prompt.columns["answer"]) == 1.0


def test_the_verifier_of_reasoning_gym_has_the_parameters_of_the_data_set() -> None:
    pytest.importorskip("reasoning_gym")
    given, default = (
        task.build(GymTask(dataset="puzzle24", size=1, held_out=0.0, parameters=parameters), 5).prompt(0)
        for parameters in ({"max_value": 4}, {})
    )
    assert gym_score(default, "6*4*1*1") == 1.0
    assert gym_score(given, "6*4*1*1") < 0.1


def test_reasoning_gym_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(TaskError, match=r"streamppo\[gym\]"):
        task.build(GymTask(dataset="chain_sum"), 1)
