"""Which cases and tests the marks choose, and what becomes of a test that crashes its process."""

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import conftest
import pytest
from conftest import REPOSITORY, ChosenCases, values, without_sample

from tests import durations

pytest_plugins = ["pytester"]

SIZES = (5, 4, 3)
MARKERS = "[pytest]\nmarkers =\n slow: x\n quick: x\n sampled(n): x\n"


@pytest.fixture(name="cases")
def every_combination(pytester: pytest.Pytester) -> list[pytest.Item]:
    """The cases that pytest makes of three parameters."""
    marks = (f"@pytest.mark.parametrize({name!r}, range({size}))" for name, size in zip("abc", SIZES, strict=True))
    return pytester.getitems("\n".join(("import pytest", *marks, "def test_one(a, b, c): pass")))


def test_as_few_cases_as_the_largest_parameter_has_values_show_every_value(cases: list[pytest.Item]) -> None:
    rest = without_sample(cases, SIZES[0])
    drawn = [item for item in cases if item not in rest]
    assert len(drawn) == SIZES[0]
    assert len(set().union(*map(values, drawn))) == sum(SIZES)


def test_the_draw_depends_on_the_names_alone(cases: list[pytest.Item]) -> None:
    assert without_sample(cases, 3) == without_sample(cases[::-1], 3)


def test_the_draw_is_the_same_in_every_checkout(monkeypatch: pytest.MonkeyPatch, cases: list[pytest.Item]) -> None:
    def left(repository: str) -> list[str]:
        monkeypatch.setattr(conftest, "REPOSITORY", repository)
        spec = (cast("pytest.Function", item).callspec for item in cases)
        items = [
            SimpleNamespace(nodeid=f"{repository} {item.nodeid}", callspec=one)
            for item, one in zip(cases, spec, strict=True)
        ]
        rest = without_sample(cast("list[pytest.Item]", items), 3)
        return [item.nodeid.removeprefix(repository) for item in rest]

    assert left("/here") == left("/there")


@pytest.mark.parametrize("number", [60, 61])
def test_of_as_few_cases_as_are_wanted_none_is_left(number: int, cases: list[pytest.Item]) -> None:
    assert without_sample(cases, number) == []


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
    pytester.makeini(MARKERS)
    for chosen, passed in (("not slow", 3), ("slow", 5)):
        done = pytester.inline_run("-m", chosen, plugins=[ChosenCases()])
        assert done.countoutcomes() == [passed, 0, 0]


def test_what_took_long_in_a_run_of_all_tests_is_not_quick(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(durations, "FILE", tmp_path / "durations.txt")
    monkeypatch.setattr(durations, "QUICK_S", 0.5)
    pytester.makepyfile(
        """
        import pytest, time

        @pytest.mark.parametrize("seconds", [0, 1])
        def test_long(seconds): time.sleep(seconds)

        def test_short(): pass

        class TestOf:
            def test_long(self): time.sleep(1)
            def test_short(self): pass

        @pytest.mark.slow
        def test_slow(): pass
        """
    )
    pytester.makeini(MARKERS)
    pytester.inline_run("--junitxml=all.xml")
    durations.write(pytester.path / "all.xml")
    file = "test_what_took_long_in_a_run_of_all_tests_is_not_quick.py"
    assert durations.listed() == {f"{file}::test_long", f"{file}::TestOf::test_long"}
    done = pytester.inline_run("-m", "quick", plugins=[ChosenCases()])
    passed, *_ = done.listoutcomes()
    assert [one.nodeid for one in passed] == [f"{file}::test_short", f"{file}::TestOf::test_short"]


@pytest.mark.slow
def test_a_test_that_crashes_its_process_runs_once_and_the_others_run(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os\ndef test_before(): pass\ndef test_crash(): os._exit(1)\ndef test_after(): pass\n"
    pytester.makepyfile(test_one=code, test_two="def test_other(): pass\n")
    monkeypatch.setenv("PYTHONPATH", f"{REPOSITORY}:{REPOSITORY / 'tests' / 'support'}")
    pytester.makeconftest(f"""
        import runpy
        pytest_xdist_make_scheduler = runpy.run_path({conftest.__file__!r})["pytest_xdist_make_scheduler"]
        """)
    done = pytester.runpytest_subprocess("-n", "1", "-p", "no:cacheprovider", timeout=100)
    done.assert_outcomes(passed=3, failed=1)
