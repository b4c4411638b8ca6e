"""Columns reach rewards as plain Python, the same in every process, or are left out by name."""

import asyncio
import datetime
import math
import sys
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from config_case import one_source
from reward_case import one_function, started, text

from streamppo.errors import TaskError
from streamppo.tasks import columns, task
from streamppo.tasks.rewards import signature
from streamppo.types import Prompt, ScoredText

UTC = datetime.UTC
MOMENT = datetime.datetime(2024, 1, 2, 3, 4, 5, 678901)
PLAIN: list[Any] = [
    None,
    True,
    0,
    -(2**63),
    2**64 - 1,
    2**64,
    -(2**63) - 1,
    10**5000,
    1.5,
    -math.inf,
    "text",
    "\u00e9\U0001f600",
    "half \ud83d of a pair",
    b"\x00\xff",
    [],
    [1, [2, ["x", None]], {"a": [2**70]}],
    {},
    {"a": {"b": [MOMENT]}, "\ud83d": 1},
    {1: "one", None: 2, (1, 2): 3},
    Decimal("1.10"),
    Decimal("NaN"),
    Fraction(1, 3),
    UUID(int=7),
    MOMENT,
    MOMENT.replace(tzinfo=UTC),
    MOMENT.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=5, minutes=30))),
    datetime.date(1, 1, 1),
    datetime.time(1, 2, 3, 4),
    datetime.timedelta(days=-1, microseconds=1),
    datetime.timedelta.max,
]


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and (one == other or repr(one) == repr(other))


@pytest.mark.parametrize("value", PLAIN, ids=lambda one: type(one).__name__)
def test_a_plain_value_stays_as_it_is_here_and_in_another_process(value: Any, echo: Any) -> None:
    assert same(columns.plain(value), value)
    assert same(echo(value), value)


OTHERS: list[tuple[Any, Any]] = [
    (np.int64(3), 3),
    (np.float32(0.5), 0.5),
    (np.longdouble(0.5), 0.5),
    (np.bool_(True), True),
    (np.str_("x"), "x"),
    (np.bytes_(b"x"), b"x"),
    (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (np.array(["a", None], dtype=object), ["a", None]),
    (np.datetime64("2024-01-02T03:04:05.678901234", "ns"), MOMENT),
    (np.timedelta64(5_000, "ns"), datetime.timedelta(microseconds=5)),
    (np.array(["2024-01-02"], dtype="datetime64[D]"), [datetime.date(2024, 1, 2)]),
    (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
    (torch.tensor(3), 3),
    ((1, (2, 3)), [1, [2, 3]]),
    ({1}, [1]),
    (bytearray(b"x"), b"x"),
    (type("Text", (str,), {})("x"), "x"),
    (type("Whole", (int,), {})(3), 3),
    ({"a": (np.int64(1),)}, {"a": [1]}),
]


@pytest.mark.parametrize(("value", "wanted"), OTHERS, ids=lambda one: type(one).__name__)
def test_a_value_of_another_library_becomes_a_plain_one(value: Any, wanted: Any) -> None:
    assert same(columns.plain(value), wanted)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Send a value to a process of a reward, which returns it."""
    path = tmp_path_factory.mktemp("rewards") / "echo.py"
    path.write_text(
        "from streamppo.types import Reward\n"
        "import datetime\nfrom decimal import Decimal\nfrom fractions import Fraction\nfrom uuid import UUID\n"
        "import sys\nsys.set_int_max_str_digits(0)\n"
        "def score(trajectory, value):\n"
        "    return Reward(score=1.0, explanation=ascii(value))\n"
    )
    names = {"datetime": datetime, "Decimal": Decimal, "Fraction": Fraction, "UUID": UUID, "inf": math.inf}

    def ask(value: Any) -> Any:
        return eval(said[next(n for n, one in enumerate(PLAIN) if same(one, value))], names)

    async def story() -> list[str]:
        async with started(one_function(function=f"{path}:score", processes=1)) as rewards:
            asked = [rewards.score(Prompt(text="", columns={"value": one}), text("3")) for one in PLAIN]
            return [reward.explanation for reward in await asyncio.gather(*asked)]

    before = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    said = asyncio.run(story())
    yield ask
    sys.set_int_max_str_digits(before)


@pytest.mark.parametrize(
    "value", [object(), print, [object()], {"a": {"b": object()}}], ids=["object", "function", "list", "dict"]
)
def test_a_value_that_is_no_data_is_left_out_by_name(value: Any) -> None:
    plain = columns.plain_columns({"image": value, "answer": "1"})
    assert plain.columns == {"answer": "1"}
    assert plain.omitted["image"].startswith("holds values of builtins.")


# --- parquet -------------------------------------------------------------------------------------------------

PARQUET: list[tuple[Any, Any]] = [
    (pa.array([MOMENT], pa.timestamp("s")), MOMENT.replace(microsecond=0)),
    (pa.array([1704164645678901234], pa.timestamp("ns")), MOMENT),
    (pa.array([1704164645678901234], pa.timestamp("ns", "UTC")), MOMENT.replace(tzinfo=UTC)),
    (pa.array([MOMENT], pa.timestamp("us", "Asia/Kolkata")), MOMENT.replace(tzinfo=UTC)),
    (pa.array([1_001], pa.time64("ns")), datetime.time(0, 0, 0, 1)),
    (pa.array([1_001], pa.duration("ns")), datetime.timedelta(microseconds=1)),
    (pa.array([Decimal("1.10")], pa.decimal128(5, 2)), Decimal("1.10")),
    (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    (pa.array([np.float16(0.5)], pa.float16()), 0.5),
    (pa.array([b"\xff"], pa.binary()), b"\xff"),
    (pa.array([None], pa.null()), None),
    (pa.array([[[1], None]], pa.list_(pa.list_(pa.int8()))), [[1], None]),
    (pa.array([[1704164645678901234]], pa.list_(pa.timestamp("ns"))), [MOMENT]),
    (pa.array([{"a": {"b": 1704164645678901234}}]).cast(
        pa.struct([("a", pa.struct([("b", pa.timestamp("ns"))]))])), {"a": {"b": MOMENT}}),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), [["k", 1]]),
    (pa.array(["x"]).dictionary_encode(), "x"),
]  # fmt: skip


@pytest.mark.parametrize(("column", "wanted"), PARQUET, ids=lambda one: str(getattr(one, "type", "")))
def test_a_column_of_parquet_becomes_plain_whatever_its_type(tmp_path: Path, column: Any, wanted: Any) -> None:
    table = pa.table({"prompt": ["x"], "answer": ["1"], "extra": column})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    built = task.build(one_source(data=str(tmp_path / "train.parquet"), held_out=0.0), 1)
    found = built.prompt(0).columns["extra"]
    assert found == wanted
    assert type(found) is type(wanted)
    assert built.notes() == []


def test_a_column_that_python_cannot_hold_is_left_out_by_name_and_the_rest_is_read(tmp_path: Path) -> None:
    text = pa.StringArray.from_buffers(1, pa.array([0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff"))
    far = pa.array([10**17], pa.timestamp("ms"))
    table = pa.table({"prompt": ["x"], "answer": ["1"], "broken": text, "far": far, "level": [3]})
    pyarrow.parquet.write_table(table, tmp_path / "train.parquet")
    built = task.build(one_source(data=str(tmp_path / "train.parquet"), held_out=0.0), 1)
    assert built.prompt(0).columns == {"answer": "1", "level": 3}
    notes = built.notes()
    assert [note.split(" that cannot be read")[0] for note in notes] == [
        "data: the column 'broken' holds values of string",
        "data: the column 'far' holds values of timestamp[ms]",
    ]


# --- names ---------------------------------------------------------------------------------------------------

STYLES = {
    "trajectory": "def score(trajectory, **columns):\n"
    "    return float(columns == {'level': 1, 'answer': '3'} | WANTED)",
    "annotated": "from streamppo.types import ScoredText\n"
    "def score(t: ScoredText, **columns):\n    return float('t' not in columns and columns['level'] == 1)",
    "batched": "def score(prompts, completions, **columns):\n"
    "    return [float(completions == ['3'] and columns['level'] == [1])]",
    "completions alone": "def score(completions, **columns):\n    return [float(completions == ['3'])]",
    "verl": "def score(data_source, solution_str, ground_truth, extra_info=None):\n"
    "    return float(ground_truth == '3')",
}
NAMES = ("prompts", "completions", "completion_ids", "trajectory", "t", "self", "solution_str", "data_source")


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", NAMES)
def test_a_column_called_like_a_parameter_of_the_reward_fails_no_call(tmp_path: Path, style: str, name: str) -> None:
    passed = style == "trajectory" and name != "trajectory"
    wanted = {name: "theirs"} if passed else {}
    (tmp_path / "score.py").write_text(STYLES[style].replace("WANTED", repr(wanted)))
    reward = signature.load(f"{tmp_path / 'score.py'}:score", {})
    assert not reward.signature.is_async
    one = ScoredText(prompt="1+2=", completion="3", finish="stop", num_tokens=1)
    (outcome,) = signature.call(reward, (one,), ({"answer": "3", "level": 1, name: "theirs"},))
    assert outcome.reason == ""
    assert outcome.reward is not None
    assert outcome.reward.score == 1.0


# --- prompts -------------------------------------------------------------------------------------------------


def test_a_prompt_that_is_messages_as_json_is_a_chat() -> None:
    from streamppo.config.task import Source
    from streamppo.tasks.data import content

    source = Source(data="")
    said = content(' [{"role": "user", "content": "hi"}]', "here", source)[1]
    assert [(one.role, one.content) for one in said] == [("user", "hi")]
    for plain in ("[1, 2, 3]", "[a] b", "[]", '[{"name": "x"}]', '[{"role": "user", "content": "hi"}] and more'):
        assert content(plain, "here", source) == (plain, ())
    with pytest.raises(TaskError, match="here: a message has the texts"):
        content('[{"role": "user"}]', "here", source)
