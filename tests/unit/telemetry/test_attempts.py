"""Attempts are counted by what became of them, and a dependence of failures on length is seen, and only that."""

import random
from itertools import combinations, product
from statistics import fmean, pvariance
from typing import Any

import pytest

from streamppo.telemetry import attempts
from streamppo.telemetry.attempts import Attempt, AttemptTable, LengthTest

WINDOWS, PROMPTS = 10, 60


def table(found: list[Attempt], *, compared: bool = True, whole: bool = True, read: int = 1) -> AttemptTable:
    return attempts.table(found, 1, read, compared=compared, whole_completions=whole)


def named(made: AttemptTable, by: str) -> dict[str, Any]:
    return {row["name"]: row for row in made["rows"] if row["by"] == by}


def trained(prompt: int, reward: float, **more: Any) -> Attempt:
    return Attempt("trained", prompt, more.pop("version", 0), more.pop("tokens", 5), reward=reward, **more)


# --- the table -----------------------------------------------------------------------------------------------


def test_the_example_of_the_module() -> None:
    made = table([trained(0, 1.0), trained(0, 0.5), Attempt("failed", 0, 0, 9, "reward: no")])
    whole = named(made, "all")[""]
    assert (whole["attempts"], whole["failed"], whole["reward"], whole["as_zero"]) == (3, 1 / 3, 0.75, 0.5)
    assert made["advantage_shift"] == 0.25 and made["advantage_deviation"] == 0.25


def test_every_end_has_its_share_by_reason_length_source_lag_and_hour() -> None:
    found = [
        trained(0, 1.0, lag=0, source="a", hour=0),
        trained(1, 0.0, lag=9, source="b", hour=1, tokens=8, masked=True, undelivered=True),
        Attempt("failed", 1, 3, 9, "reward: timeout", lag=2, source="b", hour=1),
        Attempt("dropped", 2, 3, 5, "too old", lag=9, source="a", hour=1),
        Attempt("lost", 3, 3, reason="lost"),
    ]
    made = table(found)
    whole = named(made, "all")[""]
    shares = [whole[name] for name in ("failed", "dropped", "lost", "masked", "undelivered")]
    assert shares == [0.2, 0.2, 0.2, 0.5, 0.5]
    assert (whole["reward"], whole["as_zero"]) == (0.5, 0.2)
    assert {name: row["attempts"] for name, row in named(made, "length").items()} == {"4 to 7": 2, "8 to 15": 2}
    assert {name: row["failed"] for name, row in named(made, "length").items()} == {"4 to 7": 0.0, "8 to 15": 0.5}
    assert [*named(made, "lag")] == ["0", "2", "8 to 15"]
    assert named(made, "source")["b"]["failed"] == 0.5 and named(made, "source")["a"]["dropped"] == 0.5
    assert {name: row["attempts"] for name, row in named(made, "hour").items()} == {"0": 1, "1": 3}
    reasons = named(made, "reason")
    assert [*reasons] == ["reward: timeout", "too old", "lost"]
    assert reasons["too old"]["as_zero"] == pytest.approx(1 / 3), "with its own attempts alone as zeros"


def test_advantages_are_of_the_batch_where_samples_of_a_prompt_are_not_compared() -> None:
    found = [trained(0, 1.0), trained(1, 0.0), Attempt("failed", 2, 0)]
    assert table(found)["advantage_shift"] == 0.0, "no attempt at their prompts failed"
    assert table(found, compared=False)["advantage_shift"] == pytest.approx(0.5 - 1 / 3)


def test_trained_ones_count_for_the_batches_that_were_not_read() -> None:
    made = attempts.table([trained(0, 1.0), Attempt("failed", 1, 0)], 9, 1, compared=True, whole_completions=True)
    (whole,) = named(made, "all").values()
    assert (whole["attempts"], whole["failed"], whole["as_zero"]) == (10, 0.1, 0.9)


def test_rows_are_bounded() -> None:
    found = [Attempt("failed", n, 0, 1 + n, f"reason {n}", lag=n, source=f"{n}x", hour=n) for n in range(500)]
    made = table(found)
    assert {by: len(named(made, by)) for by in ("reason", "source", "hour")} == {"reason": 13, "source": 12, "hour": 24}
    assert len(named(made, "lag")) == 14 and len(named(made, "length")) == 9
    assert "488 other reasons" in named(made, "reason") and "0 to 20" in named(made, "hour")


def test_a_run_in_which_nothing_failed_or_nothing_was_trained_on_has_a_table() -> None:
    assert table([])["length_test"] is None and table([])["advantage_shift"] is None
    assert [row["by"] for row in table([trained(0, 1.0)])["rows"]] == ["all"]
    assert table([Attempt("failed", 0, 0, 3, "no")])["rows"][0]["reward"] is None


# --- the length test -----------------------------------------------------------------------------------------


def test_the_statistic_is_that_of_all_orders_of_the_lengths() -> None:
    """A slow reference: the mean and the variance over every choice of which ones failed, with ties."""
    lengths, failures = [3, 5, 5, 5, 8, 8, 13], 3

    def above(lost: tuple[int, ...]) -> float:
        kept = [length for place, length in enumerate(lengths) if place not in lost]
        return sum((lengths[a] > b) + (lengths[a] == b) / 2 for a, b in product(lost, kept))

    every = [above(lost) for lost in combinations(range(len(lengths)), failures)]
    for lost in ((0, 1, 2), (4, 5, 6), (1, 3, 6)):
        found = [
            Attempt("failed" if place in lost else "trained", place, 0, length) for place, length in enumerate(lengths)
        ]
        made = attempts.length_test(found)
        assert made is not None
        assert made["z"] == pytest.approx((above(lost) - fmean(every)) / pvariance(every) ** 0.5)
        assert made["longer"] == pytest.approx(above(lost) / 12) and (made["failed"], made["trained"]) == (3, 4)


def test_windows_are_compared_each_with_itself() -> None:
    """Lengths and failures both grow, and in each window they have nothing to do with each other."""
    found: list[Attempt] = []
    for window in range(2):
        for prompt in range(40):
            end = "failed" if prompt % 8 < (1, 6)[window] else "trained"
            found.append(Attempt(end, prompt, window * attempts.WINDOW, (1 + window) * 100 + prompt // 8))
    made = attempts.length_test(found)
    assert made is not None and made["z"] == pytest.approx(0.0) and made["longer"] == 0.5


def test_a_prompt_that_always_fails_is_one_failure() -> None:
    found = [Attempt("failed", 0, 0, 99) for _ in range(50)] + [trained(n, 0.0, tokens=n) for n in range(1, 20)]
    made = attempts.length_test(found)
    assert made is not None and made["failed"] == 1 and attempts.dependence(made) is None


def test_segments_and_unknown_lengths_are_not_compared() -> None:
    found = [Attempt("failed", n, 0, 9) for n in range(30)] + [trained(n, 0.0, tokens=5) for n in range(30)]
    assert table(found)["length_test"] is not None and table(found, whole=False)["length_test"] is None
    assert attempts.length_test([one._replace(tokens=0) for one in found]) is None


def played(seed: int, *, limit: float = float("inf")) -> LengthTest | None:
    """A run with heavy tails, drift, hard prompts that always fail, and failures above a `limit` of median lengths."""
    chance, found = random.Random(seed), list[Attempt]()
    rate, drift = chance.uniform(0.01, 0.4), chance.uniform(-0.2, 0.2)
    for window, prompt in product(range(WINDOWS), range(PROMPTS)):
        level, is_hard = chance.gauss(3.0, 0.5), chance.random() < 0.05
        for _ in range(4):
            length = max(1, round(2.718 ** (level + drift * window + chance.gauss(0, 0.7))))
            is_long = length > limit * 2.718 ** (3.0 + drift * window)
            fails = is_hard or is_long or chance.random() < rate * (1 + window) / WINDOWS
            where = (window * PROMPTS + prompt, window * attempts.WINDOW, length)
            found.append(Attempt("failed" if fails else "trained", *where))
    return attempts.length_test(found)


@pytest.mark.slow
def test_no_run_whose_failures_are_chance_raises_the_sign() -> None:
    made = [played(seed) for seed in range(300)]
    assert [one for one in made if attempts.dependence(one)] == []
    scores = [one["z"] for one in made if one is not None]
    assert max(map(abs, scores)) < attempts.LEAST_Z and 0.7 < pvariance(scores) < 1.3, "it is a z"


def test_every_run_whose_long_completions_fail_raises_it() -> None:
    said = [attempts.dependence(played(seed, limit=3.0)) for seed in range(20)]
    assert all(said) and "failed completions are longer than trained ones in " in str(said[0])


@pytest.mark.parametrize(
    ("changed", "holds"),
    [({}, True), ({"failed": 19}, False), ({"z": 3.9}, False), ({"longer": 0.59}, False), ({"longer": 0.3}, True)],
)
def test_the_bounds_of_the_sign(changed: dict[str, Any], holds: bool) -> None:
    known: Any = {"failed": 20, "trained": 50, "z": 5.0, "longer": 0.7, **changed}
    assert bool(attempts.dependence(known)) == holds
