"""What a program answers, inside a test: no exception is taken for the test's own, and only data crosses."""

# A test is read best as one line.
# ruff: noqa: E501

import builtins
import collections
import datetime
import decimal
import fractions
import json
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamppo.tasks.scorers.isolated_tests import Operation, verdict
from streamppo.tasks.scorers.plain_data import Data, data_alone, decode, encode

EXCEPTIONS = sorted(
    name for name, kind in vars(builtins).items() if isinstance(kind, type) and issubclass(kind, Exception)
)
SWALLOWS = {
    "map": "assert all(map(f, [1, 1]))",
    "any": "assert not any(map(f, [1, 1]))",
    "sum": "assert sum(map(f, [1])) == 0",
    "zip": "for x, _ in zip(map(f, [1]), [1]): assert x == 5",
    "filter": "assert list(filter(f, [1])) == []",
    "a default of next": "assert next(map(f, [1]), 5) == 5",
    "a generator": "def g():\n    yield f(1)\nassert all(x == 5 for x in g())",
    "an old iteration": "class T:\n    def __getitem__(self, i): return f(1) if i < 3 else [][0]\nassert list(T()) == []",
    "hasattr": "class T:\n    x = property(lambda _: f(1))\nassert not hasattr(T(), 'x')",
    "a default of getattr": "class T:\n    x = property(lambda _: f(1))\nassert getattr(T(), 'x', 5) == 5",
    "a fall back of attributes": "class T:\n    x = property(lambda _: f(1))\n    __getattr__ = lambda *_: 5\nassert T().x == 5",
    "a length's hint": "class T:\n    __iter__ = lambda _: iter([5])\n    __len__ = lambda _: f(1)\nassert list(T()) == [5]",
    "an end of the iteration": "i = map(f, [1])\ntry:\n    next(i)\nexcept StopIteration: pass",
    "a thread": "import threading\nthreading.excepthook = lambda _: None\nt = threading.Thread(target=f, args=(1,))\nt.start()\nt.join()",
    "a future": "import concurrent.futures as c\nwith c.ThreadPoolExecutor(1) as p: p.submit(f, 1)",
}  # fmt: skip


def outcome(test: str, answer: object) -> dict[str, Data]:
    """Run a test whose program defines f alone, and answers every call with `answer`."""
    said = verdict(test, [], [])
    for _ in range(4):
        if "ask" not in said:
            break
        operations: list[Operation] = json.loads(str(said["ask"]))
        said = verdict(test, operations, [_answer(one, answer) for one in operations])
    return said


def _answer(operation: Operation, answer: Any) -> dict[str, Data]:
    if operation["do"] != "name":
        return answer
    return (
        {"object": "function"} if operation["name"] == "f" else {"raised": "NameError", "text": "", "arguments": None}
    )


@pytest.mark.parametrize("protocol", SWALLOWS)
def test_no_exception_of_a_program_ends_in(protocol: str) -> None:
    passed = [
        name
        for name in EXCEPTIONS
        if "passed" in outcome(SWALLOWS[protocol], {"raised": name, "text": "x", "arguments": None})
    ]
    assert not passed


@pytest.mark.parametrize("name", [one for one in EXCEPTIONS if not one.startswith(("Stop", "Unicode"))])
def test_a_test_accepts_an_exception_by_its_words(name: str) -> None:
    raised = {"raised": name, "text": "x", "arguments": {"list": ["x"]}}
    caught = "RuntimeError" if name == "ExceptionGroup" else name
    for test in (
        f"try:\n    f(1)\nexcept {caught}:\n    pass\nelse:\n    assert False",
        f"import pytest\nwith pytest.raises({caught}): f(1)",
        f"import contextlib\nwith contextlib.suppress({caught}): f(1)",
        f"import unittest\nunittest.TestCase().assertRaises({caught}, f, 1)",
    ):
        assert outcome(test, raised) == {"passed": True}, test


def test_a_message_and_its_arguments_are_the_programs() -> None:
    raised = {"raised": "KeyError", "text": "'a'", "arguments": {"list": ["a"]}}
    assert outcome("try: f(1)\nexcept KeyError as e: assert e.args == ('a',) and str(e) == \"'a'\"", raised) == {
        "passed": True
    }


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["value", "raised", "object", "changed", "list", "int", "range", "ndarray", "namedtuple", "Counter", "deque", "answer", "builtin", "float", "array", "Decimal"]) | st.text(max_size=3),
        inner, max_size=2,
    ),
    max_leaves=6,
)  # fmt: skip


@given(JSON)
def test_no_line_that_a_program_writes_itself_passes(line: object) -> None:
    test = "try:\n    assert f(1) == 'cd8f1e'\nexcept (LookupError, TypeError, ValueError, AttributeError): pass"
    if not (isinstance(line, dict) and "raised" in line):
        assert "passed" not in outcome(test, json.loads(json.dumps(line)))


Point = collections.namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [
        decimal.Decimal("1.50"),
        fractions.Fraction(1, 3),
        datetime.datetime(2020, 1, 2, 3, 4, 5, tzinfo=datetime.UTC),
        datetime.date(2020, 1, 2),
        datetime.time(3),
        datetime.timedelta(3, 4, 5),
        collections.Counter("aab"),
        collections.OrderedDict(a=1),
        collections.deque([1, 2], 3),
        Point(1, [2]),
        numpy.float32(1.5),
        numpy.arange(6.0).reshape(2, 3),
        [{1: (2, {3})}, b"x", -(10**40), 1j, range(3)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_data_cross_with_their_type(value: object) -> None:
    read = decode(json.loads(json.dumps(encode(value, data_alone))), data_alone)
    assert numpy.all(read == value) and type(read).__name__ == type(value).__name__


@pytest.mark.parametrize("value", [7, 2**70, -3, 1.5, "a", b"b", [1], (1, 2), {1: 2}, {3}, frozenset([4])])
def test_subclasses_become_what_they_extend(value: Any) -> None:
    kind = type(value)
    lies: dict[str, Any] = {"__eq__": lambda *_: True, "__hash__": lambda _: 1}
    read = decode(json.loads(json.dumps(encode(type("Own", (kind,), lies)(value), data_alone))), data_alone)
    assert type(read) is kind and read == value
