"""`@pytest.mark.sampled(n)`: which cases of a function the default command runs, and that the others are slow."""

import itertools
from types import SimpleNamespace
from typing import Any

import conftest
import pytest
from conftest import SampledCases, values, without_sample

pytest_plugins = ["pytester"]

SIZES = (5, 4, 3)


def cases() -> list[Any]:
    """Every combination of three parameters."""
    return [
        SimpleNamespace(
            nodeid=f"test.py::test[{places}]", callspec=SimpleNamespace(indices=dict(zip("abc", places, strict=True)))
        )
        for places in itertools.product(*map(range, SIZES))
    ]


def test_as_few_cases_as_the_largest_parameter_has_values_show_every_value() -> None:
    rest = without_sample(cases(), SIZES[0])
    names = {item.nodeid for item in rest}
    drawn = [item for item in cases() if item.nodeid not in names]
    assert len(drawn) == SIZES[0]
    assert len(set().union(*map(values, drawn))) == sum(SIZES)


def test_the_draw_depends_on_the_names_alone() -> None:
    assert [item.nodeid for item in without_sample(cases(), 3)] == [
        item.nodeid for item in without_sample(cases()[::-1], 3)
    ]


def test_the_draw_is_the_same_in_every_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def left(repository: str) -> list[str]:
        monkeypatch.setattr(conftest, "REPOSITORY", repository)
        items = [SimpleNamespace(**{**vars(item), "nodeid": f"{repository} {item.nodeid}"}) for item in cases()]
        return [item.nodeid.removeprefix(repository) for item in without_sample(items, 3)]

    assert left("/here") == left("/there")


@pytest.mark.parametrize("number", [60, 61])
def test_of_as_few_cases_as_are_wanted_none_is_left(number: int) -> None:
    assert without_sample(cases(), number) == []


def test_the_other_cases_are_slow_and_run_with_the_slow_ones(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.sampled(2)
        @pytest.mark.parametrize("value", [*range(6), pytest.param(6, marks=pytest.mark.slow)])
        def test_one(value): pass

        def test_two(): pass
        """
    )
    pytester.makeini("[pytest]\nmarkers =\n slow: x\n sampled(n): x\n")
    for chosen, passed in (("not slow", 3), ("slow", 5)):
        done = pytester.inline_run("-m", chosen, plugins=[SampledCases()])
        assert done.countoutcomes() == [passed, 0, 0]
