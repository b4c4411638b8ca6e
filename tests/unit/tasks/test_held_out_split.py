"""No prompt is both trained on and held out: rows are divided by the content of their prompts."""

import json
from collections.abc import Iterator, Set
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from config_case import one_source

from streamppo.config.task import ArithmeticTask, CalculatorTask, DataTask, GymTask, Source, Task, VerifiersTask
from streamppo.errors import TaskError
from streamppo.tasks import task
from streamppo.tasks.library import verifiers
from streamppo.tasks.split import key


def jsonl(path: Path, prompts: list[Any]) -> str:
    path.write_text("".join(json.dumps({"prompt": one, "answer": "1"}) + "\n" for one in prompts))
    return str(path)


def shared(config: Task, seed: int = 1) -> tuple[int, int, int]:
    """Contents on both sides, training rows, and held-out rows."""
    built = task.build(config, seed)
    held_out = built.held_out(None)
    both = {key(one.text) for one in built.training} & {key(one.text) for one in held_out}
    return len(both), len(built.training), len(held_out)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("dataset", "parameters"),
    [
        ("coin_flip", {}),
        ("tower_of_hanoi", {}),
        ("prime_factorization", {}),
        ("chain_sum", {"max_digits": 1, "min_digits": 1, "max_terms": 2, "min_terms": 2}),
        ("dice", {}),
        ("leg_counting", {}),
    ],
)
def test_problems_of_reasoning_gym_that_repeat_are_on_one_side(dataset: str, parameters: Any, seed: int) -> None:
    pytest.importorskip("reasoning_gym")
    config = GymTask(dataset=dataset, parameters=parameters, size=300, held_out=0.1)
    both, trained, held_out = shared(config, seed)
    assert both == 0
    assert trained > 0
    assert held_out > 0


@pytest.mark.parametrize("kind", [ArithmeticTask, CalculatorTask])
@pytest.mark.parametrize("numbers", [(0, 1), (0, 9), (10, 12)])
def test_sums_are_on_one_side_and_a_share_is_never_none(kind: type[ArithmeticTask], numbers: tuple[int, int]) -> None:
    both, trained, held_out = shared(kind(first=numbers, second=numbers, held_out=0.01))
    assert both == 0
    assert trained > 0
    assert held_out > 0


VARIANTS = [
    "What is 1 + 2?",
    "what is 1 + 2?",
    " What  is\n1 + 2?\t",
    "What is 1 + 2\uff1f",
    [["user", "What is 1 + 2?"]],
]


@pytest.mark.parametrize("how", [{}, {"chat": True}, {"system": "be brief"}])
def test_rows_that_differ_in_white_space_case_and_form_alone_are_on_one_side(tmp_path: Path, how: Any) -> None:
    variants = [
        [dict(zip(("role", "content"), m, strict=True)) for m in v] if isinstance(v, list) else v for v in VARIANTS
    ]
    for seed in range(5):
        data = jsonl(tmp_path / "rows.jsonl", [*variants, *(f"other {n}" for n in range(5))])
        both, trained, held_out = shared(one_source(data=data, held_out=0.5, **how), seed)
        assert both == 0
        assert held_out == 3
        assert trained in (3, 7)


def test_repeated_rows_are_counted_trained_on_as_often_as_they_come_and_evaluated_on_once(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [f"p{n}" for n in range(10)] * 3)
    built = task.build(one_source(data=data, held_out=0.2), 1)
    assert (len(built.training), len(built.held_out(None))) == (24, 2)
    assert built.notes() == ["data: 20 of 30 rows repeat the prompt of an earlier row"]


def test_rows_without_a_repetition_are_divided_as_a_permutation_says(tmp_path: Path) -> None:
    import numpy as np

    data = jsonl(tmp_path / "rows.jsonl", [f"p{n}" for n in range(40)])
    built = task.build(one_source(data=data, held_out=0.25), 7)
    order = np.random.default_rng((7, 0xF11E)).permutation(40)
    assert [one.text for one in built.held_out(None)] == [f"p{n}" for n in order[:10]]
    assert [one.text for one in built.training] == [f"p{n}" for n in sorted(order[10:])]
    assert built.notes() == []


@pytest.mark.parametrize("count", [2, 9, 10, 19])
def test_a_share_never_rounds_to_none(tmp_path: Path, count: int) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [f"p{n}" for n in range(count)])
    assert shared(one_source(data=data)) == (0, count - 1, 1)
    assert shared(one_source(data=data, held_out=0.0)) == (0, count, 0)


@pytest.mark.parametrize("count", [1, 7])
def test_one_prompt_in_all_rows_cannot_be_divided(tmp_path: Path, count: int) -> None:
    data = jsonl(tmp_path / "rows.jsonl", ["the same"] * count)
    with pytest.raises(TaskError, match=r"with 1 different prompt: held_out \(0.05\) leaves none.*set held_out = 0"):
        task.build(one_source(data=data), 1)
    assert shared(one_source(data=data, held_out=0.0)) == (0, count, 0)


def test_evaluation_on_the_training_rows_is_refused(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "train.jsonl", ["a", "b"])
    for config in (
        one_source(data=data, evaluation=data),
        one_source(data=data, evaluation=str(tmp_path / "." / "train.jsonl")),
        one_source(data=data, evaluation=data, evaluation_split="test"),
        one_source(data=str(tmp_path), evaluation_split="train"),
        one_source(data=str(tmp_path), evaluation=str(tmp_path)),
    ):
        with pytest.raises(TaskError, match="has the training rows, whose accuracy measures memory"):
            task.build(config, 1)


def test_evaluation_prompts_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "train.jsonl", ["a", "b", "c"])
    other = jsonl(tmp_path / "test.jsonl", ["A ", "d", "e"])
    built = task.build(one_source(data=data, evaluation=other), 1)
    assert len(built.held_out(None)) == 3
    assert built.notes() == [
        "data: 1 of 3 evaluation prompts is in the training rows too: their accuracy measures memory"
    ]


def test_what_one_source_holds_out_no_other_trains_on(tmp_path: Path) -> None:
    prompts = [f"p{n}" for n in range(20)]
    first, second = jsonl(tmp_path / "a.jsonl", prompts), jsonl(tmp_path / "b.jsonl", prompts[::-1])
    sources = {
        "first": Source(data=first, held_out=0.2),
        "second": Source(data=second, held_out=0.2, system="Think."),
    }
    built = task.build(DataTask(sources=sources), 1)
    trained = {key(one.text.removeprefix("Think.")) for one in built.training}
    held_out = {key(one.text.removeprefix("Think.")) for one in built.held_out(None)}
    assert not trained & held_out
    assert len(trained | held_out) == 20
    assert built.notes() == []


class Row(NamedTuple):
    """A task of verifiers, as far as it is read."""

    prompt_text: str
    answer: str = "1"
    idx: int = 0

    def model_dump_json(self, exclude: Set[str] = frozenset()) -> str:
        return json.dumps({name: value for name, value in self._asdict().items() if name not in exclude})


class Taskset:
    """An endless taskset of verifiers whose prompts repeat."""

    def take(self, count: int) -> Iterator[SimpleNamespace]:
        return (SimpleNamespace(data=Row(f"p{number % 20}")) for number in range(count))


def test_tasks_of_verifiers_that_repeat_are_on_one_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_environment", lambda _: SimpleNamespace(taskset=Taskset()))
    assert shared(VerifiersTask(environment="endless", held_out=0.25, rows=40)) == (0, 30, 5)
    assert shared(VerifiersTask(environment="endless", held_out=0.25, rows=20)) == (0, 15, 5)


class Game:
    """A taskset of games with the same instructions: a task is its seed."""

    def take(self, count: int) -> Iterator[SimpleNamespace]:
        return (SimpleNamespace(data=Row("Guess the word.", str(number // 2), number)) for number in range(count))


def test_games_with_one_prompt_are_told_apart_by_the_rest_of_their_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifiers, "_environment", lambda _: SimpleNamespace(taskset=Game()))
    built = task.build(VerifiersTask(environment="wordle", held_out=0.25, rows=40), 1)
    trained, held_out = ({one.columns["answer"] for one in rows} for rows in (built.training, built.held_out(None)))
    assert (len(trained), len(held_out), trained & held_out) == (15, 5, set())
