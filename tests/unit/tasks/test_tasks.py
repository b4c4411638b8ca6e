"""Prompts are a function of seed and number; files become prompts."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tokenizers
from config_case import one_source
from tokenizers import models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Config

from streamppo.config.task import ArithmeticTask, CalculatorTask, DataTask, Source
from streamppo.errors import TaskError
from streamppo.tasks import task
from streamppo.tasks.library import arithmetic
from streamppo.tasks.order import RowNumbers
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Prompt, decode, encode

FORCED = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
"""The setting of transformers that cleans up spaces of BPE tokenizers too."""


# --- prompts -------------------------------------------------------------------------------------------------


def test_every_problem_is_either_trained_on_or_held_out_and_has_the_right_answer() -> None:
    built = task.build(ArithmeticTask(first=(0, 99), second=(0, 9), held_out=0.2), seed=3)
    training, held_out = built.training, built.held_out(1000)
    texts = [prompt.text for prompt in (*training, *held_out)]
    assert len(texts) == len(set(texts)) == 1000
    assert 150 < len(held_out) < 250
    mirrored = {"+".join(reversed(prompt.text[:-1].split("+"))) + "=" for prompt in training}
    assert not mirrored & {prompt.text for prompt in held_out}
    for prompt in training:
        a, b = prompt.text.removesuffix("=").split("+")
        assert prompt.columns["answer"] == str(int(a) + int(b))


def test_a_prompt_depends_on_seed_and_number_alone() -> None:
    config = ArithmeticTask(first=(0, 9), second=(0, 9))
    first, again, other = task.build(config, 1), task.build(config, 1), task.build(config, 2)
    numbers = [0, 500, 3, 89, 90, 91]
    assert [first.prompt(n) for n in numbers] == [again.prompt(n) for n in sorted(numbers, key=numbers.index)]
    assert [first.prompt(n) for n in range(50)] != [other.prompt(n) for n in range(50)]


def test_every_epoch_visits_every_training_prompt_once_in_another_order() -> None:
    built = task.build(ArithmeticTask(first=(0, 9), second=(0, 9)), 1)
    count = len(built.training)
    epochs = [[built.prompt(epoch * count + n).text for n in range(count)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(prompt.text for prompt in built.training)
    assert epochs[0] != epochs[1]


def test_the_rows_of_prompts_can_be_found_without_them(tmp_path: Path) -> None:
    """What crosses to the queue maps each prompt to the row that the task has for it, over sources and epochs."""
    for name, count in (("a", 7), ("b", 12), ("c", 3)):
        rows = [{"prompt": f"{name}{n}", "answer": "x"} for n in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    weights = {"a": 3.0, "b": 0.5, "c": 1.0}
    sources = {
        name: Source(data=str(tmp_path / f"{name}.jsonl"), weight=weight, held_out=0.0)
        for name, weight in weights.items()
    }
    for config in (
        DataTask(sources=sources),
        DataTask(sources={"b": sources["b"]}),
        ArithmeticTask(first=(0, 9), second=(0, 9)),
        CalculatorTask(first=(0, 9), second=(0, 9)),
    ):
        built = task.build(config, 5)
        row_of = decode(encode(built.row_numbers()), RowNumbers).of_prompts()
        found = {row_of(number): built.prompt(number).text for number in range(3000)}
        assert found == dict(enumerate(prompt.text for prompt in built.training))
        assert all(found[row_of(number)] == built.prompt(number).text for number in range(3000))


ROWS = [{"prompt": f"p{n}", "answer": f"a{n}", "level": n} for n in range(40)]


def write(path: Path, rows: list[dict[str, object]]) -> DataTask:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return one_source(data=str(path), held_out=0.25)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_files_give_prompts_with_all_their_columns_and_a_held_out_share(tmp_path: Path, name: str) -> None:
    built = task.build(write(tmp_path / name, ROWS), 1)
    training, held_out = built.training, built.held_out(100)
    assert (len(training), len(held_out)) == (30, 10)
    everything = sorted((*training, *held_out), key=lambda prompt: int(prompt.text[1:]))
    assert [prompt.columns for prompt in everything] == [{"answer": r["answer"], "level": r["level"]} for r in ROWS]


def test_columns_can_have_other_names_and_evaluation_another_file(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"question": "1", "solution": "2"}\n')
    (tmp_path / "test.jsonl").write_text('{"question": "3", "solution": "4"}\n')
    config = one_source(
        data=str(tmp_path / "train.jsonl"),
        evaluation=str(tmp_path / "test.jsonl"),
        prompt="question",
        answer="solution",
    )
    built = task.build(config, 1)
    assert built.prompt(7).text == "1"
    assert built.held_out(10)[0].columns == {"question": "3", "answer": "4", "solution": "4"}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", '{"prompt": "x"}\n', r"row 1: no column 'answer'; columns are prompt"),
        ("a.jsonl", '{"prompt": "x", "answer": "y"}\n{"pro', "line 2: not JSON"),
        ("a.jsonl", "[1]\n", "must be an object, this is a list; each line of the file must be one JSON object"),
        (
            "a.jsonl",
            '[\n {"prompt": "x", "answer": "y"}\n]\n',
            "not JSON: .*; each line of the file must be one JSON object",
        ),
        ("a.jsonl", '{"prompt": "", "answer": "y"}\n', "not empty, not"),
        ("a.jsonl", "", "no rows"),
        ("a.txt", "prompt,answer\n", "use .jsonl, .json, .csv, .parquet or .jsonl.gz"),
        ("a.parquet", "no parquet", "not a parquet file"),
    ],
)
def test_an_unusable_file_is_named_with_its_row(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(TaskError, match=message):
        task.build(one_source(data=str(tmp_path / name)), 1)


# --- tokens --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["12+345=", "a b  c\n\td", "Zoé: 你好 🙂"])
def test_the_character_tokenizer_reads_back_what_it_wrote_also_beside_its_model(tmp_path: Path, text: str) -> None:
    character_tokenizer("".join(sorted(set(text)))).save_pretrained(tmp_path)
    # transformers chooses the tokenizer's class by the model that it finds beside it.
    Qwen2Config().save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode(Prompt(text=text, columns={}))
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(np.append(ids[:2], tokenizer.eos_id)) == text[:2]


def test_a_tokenizer_that_cleans_up_spaces_decodes_as_transformers_does(tmp_path: Path) -> None:
    words = models.WordLevel({"<unk>": 0, "it": 1, "is": 2, "n't": 3, ".": 4, "<eos>": 5}, unk_token="<unk>")
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), eos_token="<eos>", clean_up_tokenization_spaces=True
    )
    made.save_pretrained(tmp_path)
    tokenizer, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = np.array([1, 2, 3, 4, 5], np.int32)
    assert tokenizer.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "it isn't."


@pytest.mark.parametrize("forced", [False, True])
def test_a_bpe_tokenizer_that_asks_for_clean_spaces_decodes_as_transformers_does_without_its_warning(
    tmp_path: Path, forced: bool, caplog: pytest.LogCaptureFixture
) -> None:
    # Llama 3's files ask for it. transformers ignores that for BPE, with a warning, unless a second setting forces it.
    made = character_tokenizer("it is .,!")
    made.clean_up_tokenization_spaces = True
    setattr(made, FORCED, forced)
    made.init_kwargs |= {"clean_up_tokenization_spaces": True, FORCED: forced}
    made.save_pretrained(tmp_path)
    tokenizer, theirs = Tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    text = "it is . it , it !"
    ids = tokenizer.encode(Prompt(text=text, columns={}))
    monitored = logging.getLogger("transformers")
    monitored.addHandler(caplog.handler)
    try:
        got = (tokenizer.decode(ids), tokenizer.spell(ids.tolist()), "".join(tokenizer.texts(ids.tolist())))
        assert not caplog.messages
        assert got == (text if not forced else theirs.decode(ids),) * 2 + (text,)
    finally:
        monitored.removeHandler(caplog.handler)
    assert theirs.decode(ids) == ("it is. it, it!" if forced else text)


def test_a_tokenizer_that_decodes_in_its_own_way_is_asked_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *given: Any, **named: Any) -> str:
            return super()._decode(*given, **named).upper()

    character_tokenizer("abc").save_pretrained(tmp_path)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", Own.from_pretrained)
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(Prompt(text="abc", columns={}))) == "ABC"


def test_sums_have_the_ids_of_their_alphabet(tmp_path: Path) -> None:
    character_tokenizer(arithmetic.ALPHABET).save_pretrained(tmp_path)
    assert Tokenizer(tmp_path).encode(Prompt(text="09+=", columns={})).tolist() == [3, 12, 13, 14]
