"""Data sets of every form become prompts; positions become rows by the seed alone."""

import json
import os
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from config_case import one_source
from tokenizers.processors import TemplateProcessing

from streamppo.config.task import DataTask, Source
from streamppo.errors import TaskError
from streamppo.tasks import dataset_files, task
from streamppo.tasks.order import PromptOrder, ShuffledOrder
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Message, Prompt

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """One token for each character, with a chat template."""
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz0123456789+=[] ")
    made.chat_template = TEMPLATE
    made.save_pretrained(tmp_path / "tokenizer")
    return Tokenizer(tmp_path / "tokenizer")


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def numbered(name: str, count: int) -> list[dict[str, Any]]:
    return [{"prompt": f"{name} {n}", "answer": str(n)} for n in range(count)]


# --- forms ---------------------------------------------------------------------------------------------------

VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "what is 1+2"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "3"},
    "extra_info": {"split": "train", "index": 0},
}


def test_verls_five_columns_are_read_as_they_are(tmp_path: Path, tokenizer: Tokenizer) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([VERL]), tmp_path / "train.parquet")
    built = task.build(one_source(data=str(tmp_path / "train.parquet"), held_out=0.0), 1, tokenizer)
    prompt = built.prompt(0)
    assert prompt.messages == (Message(role="user", content="what is 1+2"),)
    assert prompt.columns["answer"] == "3"
    assert prompt.columns["extra_info"] == {"split": "train", "index": 0}
    assert (prompt.source, built.sources()) == ("openai/gsm8k", {"openai/gsm8k"})
    assert tokenizer.render(prompt) == "[user]what is 1+2<eos>[assistant]"
    assert tokenizer.decode(tokenizer.encode(prompt)) == "[user]what is 1+2[assistant]"
    assert list(tokenizer.encode(prompt)).count(tokenizer.eos_id) == 1


def test_a_string_becomes_a_chat_with_a_system_message_where_the_source_says_so(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [{"prompt": "hello", "answer": ""}])
    plain, chat, system = (
        task.build(one_source(data=data, held_out=0.0, **how), 1, tokenizer).prompt(0)
        for how in ({}, {"chat": True}, {"system": "be brief"})
    )
    assert tokenizer.render(plain) == "hello"
    assert tokenizer.render(chat) == "[user]hello<eos>[assistant]"
    assert tokenizer.render(system) == "[system]be brief<eos>[user]hello<eos>[assistant]"


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize("place", [0, 1])
def test_a_second_system_message_is_refused_with_the_row(tmp_path: Path, role: str, place: int) -> None:
    asked = {"role": "user", "content": "hello"}
    turns = [asked]
    turns.insert(place, {"role": role, "content": "be kind"})
    data = jsonl(tmp_path / "rows.jsonl", [{"prompt": [asked], "answer": ""}, {"prompt": turns, "answer": ""}])
    assert len(task.build(one_source(data=data, held_out=0.0), 1).training) == 2
    with pytest.raises(TaskError, match=r"row 2: the prompt has a system message, and task\.system is a second"):
        task.build(one_source(data=data, held_out=0.0, system="be brief"), 1)


@pytest.mark.parametrize(("column", "kept"), [("question", True), ("messages", True), ("prompt", False)])
@pytest.mark.parametrize("value", ["what", [{"role": "user", "content": "what"}]])
def test_rewards_may_name_the_column_of_the_prompt_but_for_prompt_itself(
    tmp_path: Path, column: str, kept: bool, value: object
) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [{column: value, "answer": "3"}])
    prompt = task.build(one_source(data=data, held_out=0.0, prompt=column), 1).prompt(0)
    assert prompt.columns == {"answer": "3", **({column: value} if kept else {})}


def test_messages_need_a_tokenizer_with_a_template(tmp_path: Path) -> None:
    character_tokenizer("ab").save_pretrained(tmp_path)
    data = jsonl(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": ""}])
    with pytest.raises(TaskError, match="no chat template"):
        task.build(one_source(data=data, chat=True), 1, Tokenizer(tmp_path))


def test_a_template_writes_its_own_special_tokens_and_a_plain_text_gets_the_tokenizers(tmp_path: Path) -> None:
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz[]")
    made.chat_template = TEMPLATE
    made.backend_tokenizer.post_processor = TemplateProcessing(single="<unk> $A", special_tokens=[("<unk>", 2)])
    made.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.ids(Prompt(text="ab", columns={}))[0] == 2
    assert 2 not in tokenizer.ids(Prompt(text="", columns={}, messages=(Message(role="user", content="ab"),)))


def test_columns_are_mapped_also_from_one_level_down(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [{"q": "x", "meta": {"gold": 4, "level": 2}}])
    config = one_source(data=data, held_out=0.0, prompt="q", answer="meta.gold", columns={"grade": "meta.level"})
    assert task.build(config, 1).prompt(0).columns == {
        **{"q": "x", "meta": {"gold": 4, "level": 2}},
        **{"answer": 4, "grade": 2},
    }
    with pytest.raises(TaskError, match=r"row 1: no column 'meta\.silver'"):
        task.build(one_source(data=data, prompt="q", answer="meta.silver"), 1)


def test_a_data_set_without_answers_says_so(tmp_path: Path) -> None:
    data = jsonl(tmp_path / "rows.jsonl", [{"prompt": "x", "level": 1}])
    assert task.build(one_source(data=data, answer="", held_out=0.0), 1).prompt(0).columns == {"level": 1}


def test_a_folder_has_splits_as_files_or_as_folders(tmp_path: Path) -> None:
    jsonl(tmp_path / "data" / "train-00000-of-00002.jsonl", numbered("a", 2))
    jsonl(tmp_path / "data" / "train-00001-of-00002.jsonl", numbered("b", 2))
    jsonl(tmp_path / "test" / "0.jsonl", numbered("c", 3))
    built = task.build(one_source(data=str(tmp_path), evaluation_split="test"), 1)
    assert sorted(prompt.text for prompt in built.training) == ["a 0", "a 1", "b 0", "b 1"]
    assert [prompt.text for prompt in built.held_out(9)] == ["c 0", "c 1", "c 2"]
    with pytest.raises(TaskError, match=r"no file of the split 'validation'.*train-00000-of-00002.jsonl"):
        task.build(one_source(data=str(tmp_path), split="validation"), 1)


def test_a_folder_by_save_to_disk_is_read_without_the_library(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / split, 3)
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for data in (tmp_path, tmp_path / "train"):
        assert len(task.build(one_source(data=str(data), held_out=0.0), 1).training) == 3


def saved(folder: Path, count: int) -> str:
    """One split as `save_to_disk` leaves it."""
    table = pyarrow.Table.from_pylist(numbered("a", count))
    folder.mkdir()
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    return str(folder)


def test_what_has_no_splits_is_not_evaluated_on_its_training_rows(tmp_path: Path) -> None:
    file = jsonl(tmp_path / "rows.jsonl", numbered("a", 4))
    for data in (file, saved(tmp_path / "saved", 4)):
        with pytest.raises(TaskError, match=r"has no splits.*would evaluate on the training rows"):
            task.build(one_source(data=data, evaluation_split="test"), 1)
    other = jsonl(tmp_path / "test.jsonl", numbered("b", 1))
    built = task.build(one_source(data=file, evaluation=other, evaluation_split="test"), 1)
    assert [prompt.text for prompt in built.held_out(9)] == ["b 0"]


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, ending: str) -> None:
    columns = [pyarrow.array(["1+1="]), pyarrow.array(["2"]), pyarrow.array(["3"])]
    table = pyarrow.Table.from_arrays(columns, names=["prompt", "answer", "answer"])
    path = tmp_path / f"train.{ending}"
    if ending == "parquet":
        pyarrow.parquet.write_table(table, path)
    else:
        with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    with pytest.raises(TaskError, match=f"{path.name}: more than one column is named 'answer'"):
        task.build(one_source(data=str(path), held_out=0.0), 1, None)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet", "arrow"])
@pytest.mark.parametrize("kind", ["a pipe", "a device without end"])
def test_data_that_are_no_file_are_refused_at_once(tmp_path: Path, ending: str, kind: str) -> None:
    place = tmp_path / f"train.{ending}"
    os.mkfifo(place) if kind == "a pipe" else place.symlink_to("/dev/zero")
    with pytest.raises(TaskError, match=rf"train\.{ending}: not a file"):
        list(dataset_files.rows(str(place), "train"))


def test_a_hub_name_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TaskError, match=r"nobody/nothing: no such file or folder.*streamppo\[data\]"):
        task.build(one_source(data="nobody/nothing"), 1)


@pytest.mark.parametrize("name", ["trian.jsonl", "data/trian.parquet", "./rows", "/a/b", "a/b/c", "rows.json.zst"])
def test_the_name_of_a_file_that_is_not_there_is_not_asked_for_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `datasets` would try the hub for half a minute where there is no network.
    hub = SimpleNamespace(load_dataset=lambda *words, **options: [{"prompt": "of the hub", "answer": "1"}])
    monkeypatch.setitem(sys.modules, "datasets", hub)
    with pytest.raises(TaskError, match=rf"{name}: no such file or folder \(looked at /"):
        task.build(one_source(data=name), 1)


# --- lengths -------------------------------------------------------------------------------------------------


def long_rows(tmp_path: Path) -> str:
    return jsonl(tmp_path / "rows.jsonl", [*numbered("a", 4), {"prompt": "x" * 30 + "end", "answer": ""}])


def test_a_prompt_that_is_too_long_is_an_error_by_default(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(TaskError, match=r"row 5: a prompt of 33 tokens is longer than max_prompt_tokens \(10\)"):
        task.build(one_source(data=long_rows(tmp_path), max_prompt_tokens=10), 1, tokenizer)


def test_prompts_that_are_too_long_are_skipped_and_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = one_source(data=long_rows(tmp_path), max_prompt_tokens=10, too_long="skip", held_out=0.0)
    built = task.build(config, 1, tokenizer)
    assert len(built.training) == 4
    assert built.lengths() == {"data: skipped": 1}


def test_prompts_that_are_too_long_keep_their_last_tokens_and_are_counted(tmp_path: Path, tokenizer: Tokenizer) -> None:
    config = one_source(data=long_rows(tmp_path), max_prompt_tokens=10, too_long="truncate", held_out=0.0)
    built = task.build(config, 1, tokenizer)
    assert {tokenizer.decode(tokenizer.encode(prompt)) for prompt in built.training} >= {"a 0", "xxxxxxxend"}
    assert built.lengths() == {"data: truncated": 1}


# --- positions -----------------------------------------------------------------------------------------------


def mixture(tmp_path: Path) -> DataTask:
    return DataTask(
        sources={
            "easy": Source(data=jsonl(tmp_path / "easy.jsonl", numbered("easy", 50)), weight=3.0, held_out=0.1),
            "hard": Source(data=jsonl(tmp_path / "hard.jsonl", numbered("hard", 50)), weight=1.0, held_out=0.1),
        }
    )


def test_sources_are_mixed_by_weight_and_each_visits_all_its_rows(tmp_path: Path) -> None:
    built = task.build(mixture(tmp_path), 1)
    prompts = [built.prompt(n) for n in range(2048)]
    assert Counter(prompt.source for prompt in prompts) == {"easy": 1536, "hard": 512}
    visits = Counter(prompt.text for prompt in prompts)
    assert len(visits) == 90
    assert {count for text, count in visits.items() if text.startswith("easy")} <= {34, 35}
    assert {count for text, count in visits.items() if text.startswith("hard")} <= {11, 12}


def test_a_resumed_task_goes_on_with_the_prompts_that_it_would_have_had(tmp_path: Path) -> None:
    whole, resumed, other = (task.build(mixture(tmp_path), seed) for seed in (1, 1, 2))
    numbers = [1500, 3, 1025, 0, 5000]
    wanted = {n: whole.prompt(n) for n in sorted(numbers)}
    assert {n: resumed.prompt(n) for n in numbers} == wanted
    assert [whole.prompt(n) for n in range(30)] != [other.prompt(n) for n in range(30)]


def test_an_order_depends_on_the_seed_and_sources_of_equal_length_have_orders_of_their_own(tmp_path: Path) -> None:
    orders = [
        [order(position) for position in range(50)]
        for order in (ShuffledOrder(50, 1), ShuffledOrder(50, 2), ShuffledOrder(50, 1))
    ]
    assert orders[0] != orders[1] and orders[0] == orders[2]
    prompts = [task.build(mixture(tmp_path), 1).prompt(n) for n in range(200)]
    numbers = [[p.columns["answer"] for p in prompts if p.source == name][:20] for name in ("easy", "hard")]
    assert numbers[0] != numbers[1]


def test_held_out_prompts_come_from_all_sources_in_turn(tmp_path: Path) -> None:
    assert [prompt.source for prompt in task.build(mixture(tmp_path), 1).held_out(4)] == ["easy", "hard"] * 2


@pytest.mark.parametrize("weights", [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 1e-9, "b": 1.0}])
def test_every_source_has_its_share_to_one_in_a_thousand_and_at_least_one(weights: dict[str, float]) -> None:
    mixed = PromptOrder([lambda position: position] * len(weights), weights, seed=3)
    counts = Counter(mixed(position)[0] for position in range(1024))
    total = sum(weights.values())
    for number, weight in enumerate(weights.values()):
        assert counts[number] == pytest.approx(1024 * weight / total, abs=1)
        assert counts[number] >= 1


def test_a_data_task_has_one_data_set_or_several() -> None:
    with pytest.raises(ValueError, match=r"needs `data`, or tables `\[task.sources.NAME\]`"):
        DataTask()
