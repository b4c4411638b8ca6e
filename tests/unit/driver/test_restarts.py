"""Restarts of late: any deaths at any times are counted, and never without an answer."""

from hypothesis import given
from hypothesis import strategies as st

from streamppo.config.sections import Watchdog
from streamppo.driver.stages import TOGETHER_S, Restarts

PAUSES = st.one_of(st.just(0.0), st.floats(0.0, 60.0), st.sampled_from([5.0, 10.0, TOGETHER_S, 30.5, 600.0]))
DEATHS = st.lists(st.tuples(st.sampled_from(["learner", "queue", "rollout-0", "rollout-1"]), PAUSES), max_size=40)
WITHIN_S = st.one_of(st.floats(0.01, 60.0), st.sampled_from([5.0, 10.0, TOGETHER_S, 600.0]))


def waves(deaths: list[tuple[str, float]], within_s: float) -> list[float]:
    """When each group of deaths began: those of others, so shortly after it, are no restart of their own."""
    begun: list[float] = []
    together: set[str] = set()
    for who, at in deaths:
        if not begun or at - begun[-1] > min(TOGETHER_S, within_s) or who in together:
            begun.append(at)
            together = set()
        together.add(who)
    return begun


@given(DEATHS, WITHIN_S, st.floats(0.0, 1e6))
def test_restarts_are_the_waves_of_deaths_that_began_within_the_time(
    drawn: list[tuple[str, float]], within_s: float, present: float
) -> None:
    restarts, seen = Restarts(Watchdog(restarts_s=within_s)), list[tuple[str, float]]()
    for who, pause in drawn:
        present += pause
        seen.append((who, present))
        counted = restarts.add(who, present)
        assert counted == sum(present - began <= within_s for began in waves(seen, within_s))
        assert counted >= 1, "the death itself is a restart, or a part of one"


def test_deaths_some_seconds_apart_are_counted_where_restarts_are_counted_over_a_shorter_time() -> None:
    restarts = Restarts(Watchdog(restarts_s=10.0))
    assert [restarts.add(who, at) for who, at in (("a", 0.0), ("b", 15.0), ("c", 20.0), ("b", 24.0))] == [1, 1, 1, 2]
