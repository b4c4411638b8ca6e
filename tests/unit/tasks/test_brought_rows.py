"""Rows and rewards in the forms in which TRL, verl and `datasets` write them."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from config_case import one_source
from reward_case import text

from streamppo.config.reward import FunctionScorer, Reward, Scorer
from streamppo.config.task import Source
from streamppo.errors import TaskError
from streamppo.tasks import chat, data, dataset_files, task
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.rewards.signature import LoadedReward, call, detect_signature
from streamppo.tasks.scorers import code, gold
from streamppo.types import Message, Prompt, Template

ASKED = [{"role": "user", "content": "what is 1+2"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def read(folder: Path, rows: Sequence[dict[str, Any]], **source: Any) -> task.Task:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return task.build(one_source(data=str(file), held_out=0.0, **source), 1)


def prompt_of(value: object) -> Prompt:
    return data.prompt({"prompt": value, "answer": "1"}, "row 1", "data", Source(data=""))


def write_stream(table: pyarrow.Table, file: Path) -> None:
    with pyarrow.OSFile(str(file), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as to:
        to.write_table(table)


# --- columns of mixed values ---------------------------------------------------------------------------------


def as_json(values: Sequence[object], kind: pyarrow.DataType) -> pyarrow.Array:
    """A column as `datasets` writes one of the feature `Json`, `List(Json)` or a struct with one."""

    def written(value: Any, kind: pyarrow.DataType) -> Any:
        if isinstance(kind, pyarrow.JsonType):
            return json.dumps(value)
        if pyarrow.types.is_struct(kind):
            return {field.name: written(value[field.name], field.type) for field in kind}
        return [written(one, kind.value_type) for one in value]

    def stored(kind: pyarrow.DataType) -> pyarrow.DataType:
        if isinstance(kind, pyarrow.JsonType):
            return pyarrow.string()
        if pyarrow.types.is_struct(kind):
            return pyarrow.struct([(field.name, stored(field.type)) for field in kind])
        return pyarrow.list_(stored(kind.value_type))

    column = [None if value is None else written(value, kind) for value in values]
    return pyarrow.array(column, stored(kind)).cast(kind)


JSON = pyarrow.json_()
MIXED: dict[str, tuple[pyarrow.DataType, list[Any]]] = {
    "prompt": (pyarrow.list_(JSON), [ASKED, [*ASKED, {"role": "assistant", "content": None, "tool_calls": [CALL]}]]),
    "tools": (pyarrow.list_(JSON), [[TOOL], None]),
    "ground_truth": (JSON, ["Paris", ["Paris", "paris"]]),
    "info": (pyarrow.struct([("tests", JSON), ("levels", pyarrow.list_(JSON))]), [{"tests": 3, "levels": [1]}] * 2),
}


@pytest.mark.parametrize("saved", [False, True], ids=["parquet", "save_to_disk"])
def test_columns_of_mixed_values_are_read_as_the_hub_gives_them(tmp_path: Path, *, saved: bool) -> None:
    table = pyarrow.table({name: as_json(values, kind) for name, (kind, values) in MIXED.items()})
    if saved:
        write_stream(table, tmp_path / "data.arrow")
        (tmp_path / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
    else:
        pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    rows = [row for _, row in dataset_files.rows(str(tmp_path), "train")]
    assert rows == [{name: values[row] for name, (_, values) in MIXED.items()} for row in (0, 1)]
    built = task.build(one_source(data=str(tmp_path), held_out=0.0, answer="ground_truth"), 1)
    by_answer = {str(prompt.columns["answer"]): prompt for prompt in built.training}
    assert by_answer["Paris"].template.tools == (TOOL,)
    assert by_answer["['Paris', 'paris']"].messages[1].tool_calls == (CALL,)


@pytest.mark.parametrize("form", [lambda one: one, json.dumps], ids=["values", "texts"])
def test_messages_tools_and_calls_may_each_be_json(form: Any) -> None:
    row = {"tools": [form(TOOL), form(TOOL)]}
    assert chat.template(row, "tools", Template(), "row 1").tools == (TOOL, TOOL)
    said = {"role": "assistant", "tool_calls": [form(CALL)]}
    assert chat.message(form(said), "row 1").tool_calls == (CALL,)


# --- contents ------------------------------------------------------------------------------------------------

PARTS = {
    "trl": [{"type": "text", "text": "what "}, {"type": "text", "text": "is 1+2"}],
    "arrow": [{"type": "text", "text": "what is 1+2", "image": None}],
    "responses": [{"type": "input_text", "text": "what is 1+2"}],
    "texts": ["what is ", "1+2"],
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_parts_of_a_content_are_joined(tmp_path: Path, parts: list[Any]) -> None:
    (prompt,) = read(tmp_path, [{"prompt": [{"role": "user", "content": parts}], "answer": "3"}]).training
    assert prompt.messages == (Message(role="user", content="what is 1+2"),) and prompt.text == "what is 1+2"


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ([{"type": "image"}, {"type": "text", "text": "?"}], "a part of the type 'image', and the policy reads only"),
        ([{"type": "image_url", "image_url": {"url": "u"}}], "a part of the type 'image_url'"),
        ([{"text": "what"}], "a part of a message has the texts `type` and `text`"),
        ([{"type": "text", "text": None}], "a part of a message has the texts `type` and `text`"),
        ([3], "a part of a message has the texts `type` and `text`, this is 3"),
    ],
)
def test_a_part_that_is_no_text_is_refused(tmp_path: Path, parts: list[Any], why: str) -> None:
    with pytest.raises(TaskError, match=why):
        read(tmp_path, [{"prompt": [{"role": "user", "content": parts}], "answer": "3"}])


@pytest.mark.parametrize("column", ["image", "images", "videos", "audio"])
def test_rows_with_pictures_are_refused_where_the_prompt_has_a_place_for_them(tmp_path: Path, column: str) -> None:
    seen = {"prompt": "Find x in <image> or <video> or <audio>.", column: [{"path": "a.png"}], "answer": "3"}
    with pytest.raises(TaskError, match=f"placeholders for the column {column!r}, and the policy reads only text"):
        read(tmp_path, [seen])
    built = read(tmp_path, [{**seen, "prompt": "Find x."}, {**seen, column: []}])
    assert len(built.training) == 2
    assert [note for note in built.notes() if f"sounds in the column {column!r}: the policy reads only" in note]
    assert not read(tmp_path, [{**seen, column: None}]).notes()


LONG = "a long value, " * 100_000
NO_PROMPTS: dict[str, Any] = {
    "columns of pandas": {str(n): LONG for n in range(3)},
    "turns of ShareGPT": [{"from": "human", "value": LONG}],
    "no content": [{"role": "user", "text": LONG}],
    "a part": [{"role": "user", "content": [{"kind": "text", "text": LONG}]}],
    "a field": [{"role": "user", "content": "x", "tool_calls": [LONG]}],
    "texts": [LONG],
}
UNUSABLE: dict[str, Callable[[], object]] = {
    "tests": lambda: code.read_tests({"tests": LONG}),
    "a test": lambda: code.read_tests([{"input": LONG}]),
    "an answer": lambda: gold.number(LONG),
    "no number": lambda: gold.text([LONG]),
    **{name: partial(prompt_of, value) for name, value in NO_PROMPTS.items()},
}


@pytest.mark.parametrize("refused", UNUSABLE.values(), ids=UNUSABLE)
def test_a_refusal_quotes_the_beginning_of_a_long_value(refused: Callable[[], object]) -> None:
    with pytest.raises(TaskError) as raised:
        refused()
    assert len(str(raised.value)) < 600


# --- verl ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "answer"),
    [({}, "72"), ({"columns": {"answer": "answer"}}, "6*12 #### 72"), ({"answer": "label"}, "seventy-two")],
)
def test_the_answer_of_verls_rows_is_their_ground_truth(tmp_path: Path, source: dict[str, Any], answer: str) -> None:
    row = {"prompt": ASKED, "answer": "6*12 #### 72", "label": "seventy-two", "reward_model": {"ground_truth": "72"}}
    (prompt,) = read(tmp_path, [row], **source).training
    assert prompt.columns["answer"] == answer


@pytest.mark.parametrize(("turns", "count"), [((), 2), (("a", "b"), 4)])
def test_verls_extra_info_has_what_its_reward_managers_add(turns: tuple[str, ...], count: int) -> None:
    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        return extra_info["num_turns"] + len(extra_info["rollout_reward_scores"]) + extra_info["index"]

    found = LoadedReward(detect_signature(compute_score, "mine", {}), compute_score)
    observed = ((Message(role="tool", content="x"),),) * (len(turns) - 1)
    said = text("".join(turns), turns=turns, observations=observed)
    (outcome,) = call(found, (said,), ({"answer": "3", "extra_info": {"index": 10}},))
    assert outcome.reward is not None and outcome.reward.total == 10 + count


# --- conversations with their answer --------------------------------------------------------------------------


TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": [{"type": "text", "text": "2"}]},
]


@pytest.mark.parametrize("written", [TURNS, json.dumps(TURNS)], ids=["messages", "JSON"])
def test_the_last_message_is_the_answer_if_prompt_and_answer_are_one_column(tmp_path: Path, written: object) -> None:
    prompt = read(tmp_path, [{"messages": written}], prompt="messages", answer="messages").prompt(0)
    assert [message.role for message in prompt.messages] == ["system", "user"] and prompt.columns["answer"] == "2"


@pytest.mark.parametrize("turns", [TURNS[:2], TURNS[2:], "1+1", [*TURNS[:2], {"role": "assistant", "content": ""}]])
def test_a_conversation_without_an_answer_is_refused_with_its_row(tmp_path: Path, turns: object) -> None:
    with pytest.raises(TaskError, match=r"row 1: prompt and answer are the same column, so its messages must end"):
        read(tmp_path, [{"messages": turns}], prompt="messages", answer="messages")


def test_an_answer_that_is_a_message_is_its_text_and_its_own_column_stays(tmp_path: Path) -> None:
    columns = read(tmp_path, [{"prompt": TURNS[:2], "completion": TURNS[2:]}], answer="completion").prompt(0).columns
    assert columns["answer"] == "2" and columns["completion"] == TURNS[2:]


# --- TRL -----------------------------------------------------------------------------------------------------


class SoftOverlong:
    """As TRL's `get_soft_overlong_punishment` returns one."""

    def __init__(self, longest: int) -> None:
        self.longest = longest

    def __call__(self, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
        return [float(len(ids) <= self.longest) for ids in completion_ids]


def by_length(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(len(ids)) for ids in completion_ids]


@pytest.mark.parametrize(("reward", "score"), [(by_length, 2.0), (SoftOverlong(3), 1.0), (SoftOverlong(1), 0.0)])
def test_a_reward_of_token_ids_alone_is_trls(reward: Any, score: float) -> None:
    found = detect_signature(reward, "mine", {})
    assert found.style.name == "batched"
    said = text("ab", tokens=b"\x01\0\0\0\x02\0\0\0")
    (outcome,) = call(LoadedReward(found, reward), (said,), ({"answer": "3"},))
    assert outcome.reward is not None and outcome.reward.total == score


def test_arguments_of_trls_trainer_are_refused_with_what_takes_their_place() -> None:
    def stateful(completions: list[str], trainer_state: Any, **kwargs: Any) -> list[float]:
        return []

    def logs(completions: list[str], log_metric: Any) -> list[float]:
        return []

    def plays(environments: list[Any], **kwargs: Any) -> list[float]:
        return []

    for reward, advice in ((stateful, "give it a default"), (logs, "as components, and give it a default")):
        with pytest.raises(TaskError, match=f"TRL's trainer gives .*{advice}"):
            detect_signature(reward, "mine", {}).columns({"answer": "3"})
    with pytest.raises(TaskError, match=r"TRL's trainer gives environments, and an environment is the table \["):
        detect_signature(plays, "mine", {})


def test_a_scorer_that_is_for_no_prompt_is_refused_with_the_sources_that_there_are() -> None:
    scorers: dict[str, Scorer] = {
        "right": FunctionScorer(function="m:f"),
        "format": FunctionScorer(function="m:g", sources=("gsm8k", "math")),
    }
    rewards = Rewards(Reward(scorers=scorers))
    rewards.match({"math", "other"}, every=True)
    with pytest.raises(TaskError, match="'format' would never be called: its sources are 'gsm8k', 'math'") as refused:
        rewards.match({"openai/gsm8k"}, every=True)
    assert "those of the prompts are 'openai/gsm8k'; the source of a row is its column data_source" in str(
        refused.value
    )


def test_a_folder_of_saved_splits_is_read_without_the_caches_beside_them(tmp_path: Path) -> None:
    for split, count in (("train", 3), ("test", 1)):
        folder = tmp_path / split
        folder.mkdir()
        for name, rows in (("data-00000-of-00001.arrow", count), ("cache-1f3a.arrow", 7)):
            table = pyarrow.table({"prompt": [f"{split} {row}" for row in range(rows)], "answer": ["1"] * rows})
            write_stream(table, folder / name)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    built = task.build(one_source(data=str(tmp_path), evaluation_split="test"), 1)
    assert (len(built.training), len(built.held_out(None))) == (3, 1)
