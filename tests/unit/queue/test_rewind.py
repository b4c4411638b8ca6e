"""The journal of a run as it was: what was consumed stays so, what was to come is to come, each once and in order.

A queue is played at random, with failures and groups that are given up, and rewound to every one of its versions.
"""

import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from conftest import trajectory
from msgspec import structs

from streamppo.config.sections import Config
from streamppo.errors import JournalError
from streamppo.queue.rewind import RewindPoint, rewind
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueState, queue_settings
from streamppo.queue.store import archive as archives
from streamppo.queue.store import snapshot
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.tasks.order import RowNumbers, SourceRows
from streamppo.types import Failure, Ticket, Trajectory

UPDATES, SHRINKS = 8, 3
KINDS = {
    "lag 0": ("queue.max_lag=0",),
    "lag 2": ("queue.max_lag=2",),
    "groups": ("queue.max_lag=2", "algorithm.advantage={kind='grpo'}"),
    "groups that teach": ("queue.max_lag=1", "algorithm={advantage={kind='grpo'}, zero_variance='resample'}"),
    "segments": ("queue.max_lag=4", "queue.too_old=mask", "queue.segments={max_tokens=2}"),
    "segments of few long completions": (
        "queue.max_lag=1",
        "queue.too_old=mask",
        "queue.segments={max_tokens=2}",
    ),
    "lag 4": ("queue.max_lag=4",),
    "windowed": ("queue.max_lag=4", "queue.too_old=windowed"),
    "curriculum": ("queue.max_lag=0", "algorithm={advantage={kind='grpo'}, curriculum={skip='equal'}}"),
    "curriculum of groups that teach": (
        "queue.max_lag=0",
        "algorithm={advantage={kind='grpo'}, curriculum={skip='equal'}, zero_variance='resample'}",
    ),
    "curriculum of groups that are right": (
        "queue.max_lag=0",
        "algorithm={advantage={kind='grpo'}, curriculum={}, zero_variance='resample'}",
    ),
}
ROWS = RowNumbers(sources=(SourceRows(name="rows", weight=1.0, count=5, key=(1,)),), seed=1)


class Played(NamedTuple):
    """What the run had at each version: the numbers of consumed slots, and of those held at its end.

    `trained` are the numbers of the batch that made it: with segments, also of completions that go on.
    `zero_variance` is the curriculum's count of each row, `skipped` the first slots of all prompts that it skipped.
    """

    trained: dict[int, set[int]]
    consumed: dict[int, set[int]]
    held: set[int]
    opened: int
    zero_variance: dict[int, dict[int, int]]
    skipped: set[int]


def play(folder: Path, config: Config, seed: int, later: Config | None = None) -> Played:
    rng = random.Random(seed)
    rules = QueueRules(queue_settings(config), QueueState())
    long = rng.sample(range(60), 12)
    if rules.curriculum:
        rules.curriculum.map_rows(ROWS)
    samples = config.queue.samples_per_prompt
    journal, archive = Journal(folder / "journal.sqlite"), Archive(folder / "archive", {})
    journal.configure(0, msgspec.msgpack.encode(config))
    played = Played({0: set()}, {0: set()}, set(), 0, {0: {}}, set())
    waiting, call = list[tuple[Ticket, int]](), 0
    journal.write(snapshot.take_changes(rules.settings, rules.state), [made(0, None)])
    while (version := rules.state.version) < UPDATES:
        if version == SHRINKS and later is not None:
            rules.settings = queue_settings(later)
            journal.configure(version, msgspec.msgpack.encode(later))
        rules.cut_for("rollout-0", version)
        tickets = rules.issue("rollout-0", version, rng.randint(1, 9), call)
        call += bool(tickets)
        waiting += [(ticket, version) for ticket in tickets]
        rng.shuffle(waiting)
        if version < SHRINKS:
            # The newest first: later batches are of older slots.
            waiting.sort(key=lambda issued: issued[0].slot)
        for _ in range(rng.randint(0, len(waiting))):
            ticket, sampled_by = waiting.pop()
            is_cut = rules.settings.segments is not None and rng.random() < (0.9 if ticket.slot in long else 0.2)
            waiting += deliver(rules, ticket, sampled_by, rng, is_cut=is_cut)
        batch = rules.take(version)
        if batch is None:
            continue
        archived = archive.write(batch)
        rules.publish(version + 1)
        played.skipped.update(rules.state.pending_changes.skipped)
        played.zero_variance[version + 1] = dict(rules.state.zero_variance)
        journal.write(snapshot.take_changes(rules.settings, rules.state), [made(version + 1, archived)], archive.settle)
        played.trained[version + 1] = {number_of(one, samples) for one in batch.trajectories}
        numbers = {number_of(one, samples) for one in batch.trajectories if one.finish != "cut"}
        played.consumed[version + 1] = played.consumed[version] | numbers
    journal.close()
    return played._replace(held={slot.number for slot in rules.state.waiting()}, opened=rules.state.opened)


def made(version: int, archived: object) -> PublishedVersion:
    return PublishedVersion(version=version, digest=f"{version:064x}", archived=archived)  # pyright: ignore[reportArgumentType]


def number_of(one: Trajectory, samples: int) -> int:
    return one.identity.prompt * samples + one.identity.sample


def deliver(
    rules: QueueRules, ticket: Ticket, version: int, rng: random.Random, *, is_cut: bool
) -> list[tuple[Ticket, int]]:
    """Deliver a failure, a trajectory, or a segment; returns the ticket of the rest of its completion."""
    if rng.random() < 0.1:
        failure = Failure(identity=ticket.identity, actor="rollout-0", stage="reward", reason="no", tokens=1)
        rules.fail(failure)
        return []
    finish = "cut" if is_cut else "stop"
    one = trajectory([5, 6, 1], versions=[version] * 3, reward=float(rng.random() < 0.5), finish=finish)
    rules.put([structs.replace(one, identity=ticket.identity)])
    rest = structs.replace(ticket.identity, segment=ticket.identity.segment + 1)
    return [(structs.replace(ticket, identity=rest), rules.state.version)] if is_cut else []


@pytest.mark.sampled(5)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_every_version_has_what_was_to_come(
    kind: str, seed: int, tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    fields = "queue.batch_size=8", "queue.samples_per_prompt=4", "queue.max_failure_rate=1.0", *KINDS[kind]
    config, size = math_config(*fields), 4 if seed % 2 else 8
    run = tmp_path / "run"
    run.mkdir()
    # Half of the runs are resumed with smaller batches, some with another lag.
    later = math_config(*fields, f"queue.batch_size={size}", *(("queue.max_lag=0",) if kind == "lag 4" else ()))
    played = play(run, config, seed, later)
    for version in range(UPDATES + 1):
        fork = tmp_path / f"fork-{version}"
        fork.mkdir()
        held = config if version < SHRINKS else later
        rewind(run, fork, held, RewindPoint(version, 8 * version - (8 - size) * max(0, version - SHRINKS)))
        with closing(Journal.open_run(fork)) as journal:
            saved, saved_skips = journal.read(), journal.skipped()
            assert list(journal.versions()) == list(range(version + 1)) and saved is not None
        state = snapshot.rebuild_state(queue_settings(config), saved, fork)
        open_again = {slot.number for slot in state.waiting()}
        consumed = played.consumed[version]
        newest = max((number for made in range(version + 1) for number in played.trained[made]), default=-1)
        assert newest < state.opened <= min(newest - newest % 4 + 4, played.opened)
        assert state.counts["consumed"] == sum(
            len(archives.open(run).batch(one).trajectories) for one in range(version)
        )
        assert not open_again & consumed and state.held == len(open_again)
        # All that is to come is open, but for groups that the run gave up later.
        to_come = played.held.union(*(played.trained[made] for made in range(version + 1, UPDATES + 1)))
        assert open_again == {number for number in to_come if number < state.opened}
        assert kind != "lag 0" or not open_again
        assert archives.open(fork).versions() == list(range(version))
        assert {first for first, _ in saved_skips} == {n for n in played.skipped if n < state.opened}
        if "curriculum" in kind:
            assert state.zero_variance == played.zero_variance[version]
        rules = QueueRules(queue_settings(config), state)
        state.version, first_new = version, state.opened
        tickets = rules.issue("rollout-0", version, 1000, 0)
        asked = [ticket.slot for ticket in tickets]
        # With segments fewer are admitted: places are kept for their cuts.
        begun = sorted(open_again)[: len(asked) if "segments" in kind else None]
        assert asked[: len(begun)] == begun, "what was begun comes first"
        skipped = state.pending_changes.skipped
        new = [number for number in range(first_new, state.opened) if number - number % 4 not in skipped]
        assert asked[len(begun) :] == new and ("curriculum" in kind or not skipped)


@pytest.mark.parametrize("kind", ["lag 2", "segments"])
def test_a_version_is_refused_only_if_later_batches_were_not_kept(
    kind: str, tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    config = math_config("queue.batch_size=8", "queue.samples_per_prompt=4", *KINDS[kind])
    run = tmp_path / "run"
    run.mkdir()
    play(run, config, 0)
    there = {version: rewound(run, tmp_path / f"before-{version}", config, version) for version in range(UPDATES + 1)}
    with closing(Journal(run / "journal.sqlite")) as journal:
        journal.forget(3, 0)
    for version in range(UPDATES + 1):
        fork = tmp_path / f"fork-{version}"
        if 0 < version < 3:
            with pytest.raises(JournalError, match="a fork can begin at version 3 or later"):
                rewound(run, fork, config, version)
        else:
            assert rewound(run, fork, config, version) == there[version]
            assert archives.open(fork).versions() == list(range(3, version))


def rewound(run: Path, fork: Path, config: Config, version: int) -> tuple[set[int], int]:
    """The slots that are open in a new fork, and the number of all."""
    fork.mkdir()
    rewind(run, fork, config, RewindPoint(version, 8 * version))
    with closing(Journal.open_run(fork)) as journal:
        saved = journal.read()
    assert saved is not None
    state = snapshot.rebuild_state(queue_settings(config), saved, fork)
    assert (
        state.held == len({slot.number for slot in state.waiting()})
        and min(state.abandoned, *state.counts.values()) >= 0
    )
    return {slot.number for slot in state.waiting()}, state.opened
