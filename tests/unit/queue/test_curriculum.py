"""Rows whose last groups had no learning signal are skipped more often, and nothing of that is forgotten."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Container
from pathlib import Path

import pytest
from conftest import COUNTERS, trajectory
from msgspec import structs

from streamppo.commands.look import inspect as inspection
from streamppo.config.correction import Resample
from streamppo.config.sections import Config
from streamppo.driver import report as page
from streamppo.errors import ConfigError, QueueError
from streamppo.queue import report
from streamppo.queue.rules.curriculum import no_signal_reason
from streamppo.queue.rules.records import NO_ROWS, Changes, KnownRows
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueState, queue_settings
from streamppo.queue.store import snapshot
from streamppo.queue.store.journal import Journal
from streamppo.tasks.order import RowNumbers, SourceRows

GRPO = ("queue.batch_size=8", "queue.samples_per_prompt=4", "queue.max_lag=0", "algorithm.advantage.kind=grpo")
EQUAL = "algorithm.curriculum={skip='equal'}"
CALLS = itertools.count()


def rows(count: int = 10, seed: int = 1, *more: SourceRows, content: int = 0) -> RowNumbers:
    sums = SourceRows(name="sums", weight=1.0, count=count, key=(seed,), content=content)
    return RowNumbers(sources=(sums, *more), seed=seed)


def queue(config: Config, numbers: RowNumbers | None, state: QueueState | None = None) -> QueueRules:
    made = QueueRules(queue_settings(config), state or QueueState())
    if numbers is not None:
        assert made.curriculum is not None
        made.curriculum.map_rows(numbers)
    return made


def train(
    rules: QueueRules,
    rewards: Callable[[int], float],
    order: random.Random | None = None,
    *,
    right: Container[int] = (),
    seen: Counter[int] | None = None,
) -> list[int]:
    """Make an update of the next two prompts; `rewards` are of a row's samples but the first. Returns the rows.

    The first has 0, or for rows in `right` the same as the others. `seen` counts the samples of each row.
    """
    assert rules.state.rows is not None
    row_of, version = rules.state.rows.numbers.of_prompts(), rules.state.version
    trained: list[int] = []
    while (batch := rules.take(version)) is None:
        tickets = list(rules.issue("a", version, 100, next(CALLS)))
        if order is not None:
            order.shuffle(tickets)
        for ticket in tickets:
            row = row_of(ticket.identity.prompt)
            reward = rewards(row) if ticket.identity.sample or row in right else 0.0
            if seen is not None:
                seen[row] += 1
            done = trajectory([5], versions=[version], reward=reward)
            rules.put([structs.replace(done, identity=ticket.identity)])
    trained += [row_of(one.identity.prompt) for one in batch.trajectories[::4]]
    rules.publish(version + 1)
    return trained


@pytest.fixture
def config(math_config: Callable[..., Config]) -> Config:
    return math_config(*GRPO, EQUAL)


def test_a_row_is_drawn_with_the_probability_of_its_count(config: Config) -> None:
    rules = queue(config, rows(count=1))
    assert rules.curriculum is not None
    shares = list[float]()
    for count in range(6):
        rules.state.count_zero_variance(0, count)
        shares.append(sum(not rules.curriculum.skip_count(prompt) for prompt in range(2000)) / 2000)
    assert shares == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.1, 0.1], abs=0.025)
    assert shares[0] == 1.0


def test_rows_that_teach_are_sampled_in_every_epoch_and_the_others_less_and_less(config: Config) -> None:
    rules = queue(config, rows())
    trained = Counter(row for _ in range(150) for row in train(rules, lambda row: float(row < 5)))
    teaches, silent = [trained[row] for row in range(5)], [trained[row] for row in range(5, 10)]
    assert max(teaches) - min(teaches) <= 1, "rows with a signal are never skipped"
    assert 0 < max(silent) < 0.45 * min(teaches), (teaches, silent)
    assert report.report(rules.state).skipped_prompts > 50
    assert {row for row, count in rules.state.zero_variance.items() if count} == set(range(5, 10))


def test_a_group_with_a_signal_ends_the_count(config: Config) -> None:
    rules = queue(config, rows(count=2))
    while min(rules.state.zero_variance.get(row, 0) for row in (0, 1)) < 3:
        train(rules, lambda _: 0.0)
    seen = set[int]()
    while seen != {0, 1}:
        seen.update(train(rules, lambda _: 1.0))
    assert rules.state.zero_variance == {}


@pytest.mark.parametrize("seed", range(3))
def test_a_queue_that_is_rebuilt_skips_the_same_prompts(config: Config, seed: int, tmp_path: Path) -> None:
    numbers = rows(7, seed, SourceRows(name="more", weight=2.0, count=5, key=(seed, 9)))
    living, journal = queue(config, numbers), Journal(tmp_path / "journal.sqlite")
    for _ in range(40):
        train(living, lambda row: float(row % 3 == 0))
        journal.write(snapshot.take_changes(living.settings, living.state))
    rebuilt = queue(config, None, snapshot.read_state(living.settings, journal))
    assert rebuilt.state.zero_variance == living.state.zero_variance != {}
    for _ in range(20):
        assert train(rebuilt, lambda row: float(row % 3 == 0)) == train(living, lambda row: float(row % 3 == 0))
    assert rebuilt.state.opened == living.state.opened
    first_of_all = [first for first, _ in journal.skipped()]
    assert len(first_of_all) == len(set(first_of_all)) and all(first % 4 == 0 for first in first_of_all)


@pytest.mark.parametrize("variance", ["keep", "resample"])
def test_by_default_only_rows_that_are_right_are_skipped(math_config: Callable[..., Config], variance: str) -> None:
    """Rows 0 to 2 teach, 3 to 5 are always right, and the others always wrong: these may be learned later."""

    def rewards(row: int) -> float:
        return 2.0 if row < 3 else float(row < 6)

    rules = queue(math_config(*GRPO, f"algorithm.zero_variance={variance}", "algorithm.curriculum={}"), rows())
    seen = Counter[int]()
    for _ in range(120):
        train(rules, rewards, right=range(3, 6), seen=seen)
    assert set(rules.state.zero_variance) == {3, 4, 5}
    often = min(seen[row] for row in (0, 1, 2, 6, 7, 8, 9))
    assert max(seen[row] for row in (3, 4, 5)) < 0.5 * often


def test_a_row_that_is_no_longer_right_is_sampled_again(math_config: Callable[..., Config]) -> None:
    rules = queue(math_config(*GRPO, "algorithm.zero_variance=resample", "algorithm.curriculum={}"), rows(4))
    for _ in range(30):
        train(rules, lambda row: 1.0, right=range(2))
    assert set(rules.state.zero_variance) == {0, 1}
    # All samples of these rows are wrong now: no group has a signal, and none is right.
    while rules.state.zero_variance:
        train(rules, lambda row: float(row > 1))


def test_resampled_groups_count_with_the_next_version(math_config: Callable[..., Config]) -> None:
    rules = queue(math_config(*GRPO, "algorithm.zero_variance=resample", EQUAL), rows())
    for _ in range(20):
        assert all(row < 3 for row in train(rules, lambda row: float(row < 3)))
    assert set(rules.state.zero_variance) == set(range(3, 10))
    assert min(rules.state.zero_variance.values()) >= 2


def test_a_range_of_means_judges_what_is_too_easy(math_config: Callable[..., Config]) -> None:
    resample = "algorithm.resample={mean=[0.1, 0.5]}"
    rules = queue(math_config(*GRPO, "algorithm.zero_variance=resample", resample, EQUAL), rows())
    assert rules.settings.judged == Resample(mean=(0.1, 0.5))
    assert all(row < 3 for row in train(rules, lambda row: 0.5 if row < 3 else 1.0))
    assert rules.state.zero_variance.keys() & {*range(3, 10)} and not rules.state.zero_variance.keys() & {0, 1, 2}


def test_actors_with_other_rows_are_refused_and_a_driver_with_other_data_begins_anew(config: Config) -> None:
    rules = queue(config, rows())
    assert rules.curriculum is not None
    rules.curriculum.map_rows(rows())
    while not rules.state.zero_variance:
        train(rules, lambda _: 0.0)
    with pytest.raises(
        QueueError, match=r"read different data, 10 rows of sums and 11 rows of sums: .* the same files"
    ):
        rules.curriculum.map_rows(rows(11))
    rules.reopen_all()
    rules.curriculum.map_rows(rows())
    assert rules.state.zero_variance, "a new driver with the same data keeps the counts"
    snapshot.take_changes(rules.settings, rules.state)
    rules.reopen_all()
    rules.curriculum.map_rows(rows(11))
    changes = snapshot.take_changes(rules.settings, rules.state)
    assert not rules.state.zero_variance and changes.zero_variance and not any(n for _, n in changes.zero_variance)
    assert changes.rows == KnownRows(numbers=rows(11), since=rules.state.version)


def test_counts_stay_with_the_rows_and_not_with_their_order(config: Config) -> None:
    """Another weight or seed gives prompts other rows, and the rows are the same; other texts are other rows."""
    rules = queue(config, rows())
    assert rules.curriculum is not None
    while not rules.state.zero_variance:
        train(rules, lambda _: 0.0)
    kept, since = dict(rules.state.zero_variance), rules.state.version
    for numbers, stays in ((rows(seed=2), True), (rows(seed=2, content=7), False)):
        rules.reopen_all()
        rules.curriculum.map_rows(numbers)
        assert rules.state.zero_variance == (kept if stays else {})
        assert rules.state.rows == KnownRows(numbers=numbers, since=0 if stays else since)


def test_a_queue_that_died_before_its_actors_called_takes_the_rows_of_a_new_driver(config: Config) -> None:
    rules = queue(config, rows())
    rules.reopen_all()
    again = queue(config, rows(11), rules.state)
    assert again.curriculum is not None and again.state.rows == KnownRows(numbers=rows(11), since=0)
    with pytest.raises(QueueError, match="read different data"):
        again.curriculum.map_rows(rows())


def test_a_batch_that_waited_for_a_run_with_a_new_curriculum_is_consumed_once(
    math_config: Callable[..., Config], config: Config
) -> None:
    before = queue(math_config(*GRPO), None)
    for ticket in before.issue("a", 0, 8, next(CALLS)):
        before.put([structs.replace(trajectory([5], versions=[0]), identity=ticket.identity)])
    assert before.take(0) is not None
    after = queue(config, None, before.state)
    after.publish(1)
    assert (after.state.counts["consumed"], after.state.version, after.state.zero_variance) == (8, 1, {})
    assert after.curriculum is not None
    after.curriculum.map_rows(rows())
    assert after.state.rows == KnownRows(numbers=rows(), since=1)


def test_groups_without_a_curriculum_do_not_count_later(math_config: Callable[..., Config], config: Config) -> None:
    rules = queue(config, rows())
    while not rules.state.zero_variance:
        train(rules, lambda _: 0.0)
    without = queue(math_config(*GRPO), None, rules.state)
    assert without.state.zero_variance == {} and without.state.rows == KnownRows(numbers=NO_ROWS, since=1)
    again = queue(config, rows(), without.state)
    assert again.state.rows == KnownRows(numbers=rows(), since=1)


@pytest.mark.parametrize("seed", range(4))
def test_the_order_of_deliveries_does_not_change_what_is_sampled(math_config: Callable[..., Config], seed: int) -> None:
    """With `max_lag = 0`, few rows, and groups that are resampled in the middle of a version."""
    config = math_config(*GRPO, "algorithm.zero_variance=resample", EQUAL)
    first, other = queue(config, rows(12)), queue(config, rows(12))
    shuffle = random.Random(seed)
    for _ in range(30):
        made = [train(one, lambda row: float(row % 3 == 0), order) for one, order in ((first, None), (other, shuffle))]
        assert made[0] == made[1]


def test_resampled_groups_outlive_a_queue(math_config: Callable[..., Config], tmp_path: Path) -> None:
    config = math_config(*GRPO, "algorithm.zero_variance=resample", EQUAL)
    living, journal = queue(config, rows()), Journal(tmp_path / "journal.sqlite")
    for ticket in living.issue("a", 0, 8, next(CALLS)):
        living.put([structs.replace(trajectory([5], versions=[0], reward=1.0), identity=ticket.identity)])
    assert living.state.resampled == {0: True, 1: True} and not living.state.zero_variance
    journal.write(snapshot.take_changes(living.settings, living.state))
    assert snapshot.read_state(living.settings, journal).resampled == {0: True, 1: True}


def test_a_group_of_an_earlier_configuration_without_the_component_is_not_judged() -> None:
    group = [trajectory([5], reward=1.0), trajectory([5], reward=1.0)]
    assert no_signal_reason(group, Resample(component="right")) is None
    assert no_signal_reason(group, Resample()) == "all rewards are 1"


def test_even_the_least_floor_opens_a_prompt_soon(math_config: Callable[..., Config]) -> None:
    rules = queue(math_config(*GRPO, "algorithm.curriculum={floor=0.01}"), rows(count=1))
    rules.state.count_zero_variance(0, 50)
    assert len(rules.issue("a", 0, 8, next(CALLS))) == 8
    assert 2 < rules.state.counts["skipped_prompts"] < 2000
    with pytest.raises(ConfigError, match="floor"):
        math_config(*GRPO, "algorithm.curriculum={floor=0.001}")


def test_no_ticket_is_issued_before_the_rows_are_known(config: Config) -> None:
    with pytest.raises(QueueError, match="no actor has sent the order of its rows"):
        queue(config, None).issue("a", 0, 1, 0)


def test_a_skipped_prompt_says_so(config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    shape = queue_settings(config).shape
    counters = structs.replace(COUNTERS, shape=shape, opened=12, abandoned=8, counts={"skipped_prompts": 2})
    journal.write(Changes(counters, skipped=((4, 1), (8, 3))))
    journal.close()
    for prompt, groups in ((1, "group"), (2, "3 groups")):
        assert inspection.inspect_prompt(tmp_path, prompt) == 0
        assert f"prompt {prompt}: skipped by algorithm.curriculum: the last {groups} of" in capsys.readouterr().out
    _, reasons = page.read_counters(config, tmp_path, [])
    assert ("skipped prompts", "2", "algorithm.curriculum: not sampled") in reasons
