"""Simulates a run with the queue's real rules, without segments, restarts, failed samples and environments."""

import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import NamedTuple

from streamppo.commands.plan.engine import Ages, SimulatedEngine, SimulatedRow
from streamppo.commands.plan.shared_cores import SharedCores
from streamppo.commands.plan.workload import StageCosts, Workload
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.slot import SHARD_COLUMNS, TrajectoryRecord
from streamppo.queue.rules.state import PendingChanges, QueueSettings, QueueState
from streamppo.rollout.worker import GATHER_S
from streamppo.types import Ticket

DRIVER_CORES = 0.2
"""Cores that the driver and Ray's processes keep busy during a run."""


class Prediction(NamedTuple):
    """Rates over the simulated updates after the skipped updates. `lags` counts trained tokens by lag."""

    updates_per_s: float
    tokens_per_s: float
    learner_waits: float
    engines_busy: float
    tokens_lost: float
    lags: Counter[int]

    @property
    def lag_mean(self) -> float:
        return sum(lag * count for lag, count in self.lags.items()) / max(1, self.lags.total())

    def lag_quantile(self, share: float) -> int:
        """Return the lag that `share` of the trained tokens do not exceed."""
        below = itertools.accumulate(self.lags[lag] for lag in sorted(self.lags))
        counted, least = zip(sorted(self.lags), below, strict=True), share * self.lags.total()
        return next((lag for lag, count in counted if count >= least), 0)


def skipped(settings: QueueSettings) -> int:
    """Return the number of first updates that do not count in rates, because the queue is still being filled."""
    return settings.max_lag + 3


def simulate(workload: Workload, costs: StageCosts, updates: int = 60, most_s: float = inf) -> Prediction:
    """Simulate the skipped updates and `updates` more, for at most `most_s` simulated seconds."""
    return SimulatedRun(workload, costs).predict(skipped(workload.settings), updates, most_s)


class SimulatedActor:
    """Simulates the calls of a rollout actor: deliveries, which return tickets, and requests for more tickets."""

    def __init__(self, run: "SimulatedRun", name: str) -> None:
        self._run, self.name = run, name
        self.engine = SimulatedEngine(run.cores, run.workload, run.costs, self._generated, run.queue.serve)
        self._room, self._call = run.workload.in_flight, 0
        self._scored: list[TrajectoryRecord] = []
        self._lacks, self._due, self._delivering = True, False, False
        self._evaluations: list[tuple[int, int]] = []

    def evaluate(self, version: int, prompts: int) -> None:
        """Answer `prompts` prompts when the engine has `version`."""
        self._evaluations.append((version, prompts))

    def pull(self, version: int) -> None:
        self.engine.pull(version)
        due = [prompts for least, prompts in self._evaluations if least <= version]
        self._evaluations = [(least, prompts) for least, prompts in self._evaluations if least > version]
        for prompts in due:
            rows = [SimulatedRow(None, self._run.next_length()) for _ in range(prompts)]
            self._run.cores.work(prompts * self._run.costs.sample_s, lambda rows=rows: self.engine.add(rows))

    def _generated(self, row: SimulatedRow, ages: Ages) -> None:
        if row.ticket is not None:
            record = _record(row.ticket, self.name, row.length, ages)
            if self._run.costs.reward_s:
                self._run.cores.after(self._run.costs.reward_s, lambda: self._finish(record))
            else:
                self._finish(record)

    def _finish(self, record: TrajectoryRecord) -> None:
        self._scored.append(record)
        self._room += 1
        self._deliver()

    def _deliver(self) -> None:
        self._due = True
        if not self._delivering:
            self._delivering = True
            self._run.cores.after(GATHER_S, self._send)

    def _send(self) -> None:
        self._due = False
        results, self._scored = self._scored, []
        limit = 0 if self._lacks else self._room

        def stored() -> None:
            self._run.queue.rules.put_records(results)
            self._run.queue.serve()
            tickets = self._run.queue.tickets(self, limit) if limit else ()
            self._admit(tickets)
            if len(tickets) < limit:
                self._lacks = True
                self.ask()
            self._delivering = False
            if self._due:
                self._deliver()

        self._run.queue.call(len(results) * self._run.costs.stored_s, stored)

    def ask(self) -> None:
        """Request tickets until the actor has a ticket for every free place."""
        self._run.cores.after(GATHER_S, self._request)

    def _request(self) -> None:
        limit = self._room

        def receive(tickets: Sequence[Ticket]) -> None:
            self._admit(tickets)
            if len(tickets) < limit:
                self.ask()
                return
            self._lacks = False
            if self._room:
                self._deliver()

        if limit:
            self._run.queue.wait_for_tickets(self, limit, receive)
        else:
            receive(())

    def _admit(self, tickets: Sequence[Ticket]) -> None:
        if tickets:
            self._room -= len(tickets)
            assert self._room >= 0, "no more tickets than places"
            self._call += 1
            rows = [SimulatedRow(ticket, self._run.next_length()) for ticket in tickets]
            self._run.cores.work(len(rows) * self._run.costs.sample_s, lambda: self.engine.add(rows))

    def request(self, limit: int) -> tuple[Ticket, ...]:
        return self._run.queue.rules.issue(self.name, self.engine.version, limit, self._call)


class SimulatedQueue:
    """Simulates the process of the queue, which answers one call after another by the rules."""

    def __init__(self, run: "SimulatedRun") -> None:
        self._run = run
        self.rules = QueueRules(run.workload.settings, QueueState())
        self._calls: deque[tuple[float, Callable[[], None]]] = deque()
        self._is_busy = False
        self._waiting: list[tuple[SimulatedActor, int, Callable[[Sequence[Ticket]], None]]] = []
        self._batch: tuple[int, Callable[[Sequence[TrajectoryRecord]], None]] | None = None

    def call(self, seconds: float, answer: Callable[[], None]) -> None:
        self._calls.append((self._run.costs.call_s + seconds, answer))
        self._next()

    def _next(self) -> None:
        if self._is_busy or not self._calls:
            return
        self._is_busy = True
        seconds, answer = self._calls.popleft()

        def answered() -> None:
            self._is_busy = False
            answer()
            self._next()

        self._run.cores.work(seconds, answered)

    def tickets(self, actor: SimulatedActor, limit: int) -> tuple[Ticket, ...]:
        return actor.request(limit) if self.rules.has_ticket(actor.engine.version) else ()

    def wait_for_tickets(self, actor: SimulatedActor, limit: int, then: Callable[[Sequence[Ticket]], None]) -> None:
        def wait() -> None:
            self._waiting.append((actor, limit, then))
            self.serve()

        self.call(0.0, wait)

    def take(self, version: int, then: Callable[[Sequence[TrajectoryRecord]], None]) -> None:
        self._batch = version, then
        self.serve()

    def serve(self) -> None:
        """Serve waiting stages. The learner comes first, because taking a batch may reopen slots."""
        if self._batch is not None and self._batch[0] <= self.rules.state.version + 1:
            version, then = self._batch
            if (batch := self.rules.take(version)) is not None:
                self._batch = None
                records = [record for record in batch.trajectories if isinstance(record, TrajectoryRecord)]
                self.call(0.0, partial(then, records))
        # If the rules have a ticket for a version, they have a ticket for all later versions.
        newest = max((actor.engine.version for actor, _, _ in self._waiting), default=0)
        waiting = self._waiting if self._waiting and self.rules.has_ticket(newest) else []
        self._waiting = [] if waiting else self._waiting
        for actor, limit, then in waiting:
            if tickets := self.tickets(actor, limit):
                then(tickets)
            else:
                self._waiting.append((actor, limit, then))
        # Changes are discarded because there is no journal.
        self.rules.state.pending_changes = PendingChanges()


@dataclass(eq=False)
class SimulatedLearner:
    """Simulates the learner's ranks, which end each update together. At most one push is in progress."""

    run: "SimulatedRun"
    version: int = 0
    ends: list[float] = field(default_factory=lambda: [0.0])
    waits: list[float] = field(default_factory=list[float])
    tokens: list[int] = field(default_factory=list[int])
    lags: list[Counter[int]] = field(default_factory=list[Counter[int]])
    _taken: Sequence[TrajectoryRecord] | None = None
    _pushing: bool = False
    _done: int | None = None

    def take(self, version: int) -> None:
        def taken(records: Sequence[TrajectoryRecord]) -> None:
            self._taken = records
            self._begin()

        self.run.queue.take(version, taken)

    def _begin(self) -> None:
        if self._done is not None or self._taken is None:
            return
        records, self._taken, self._done = self._taken, None, 0
        run, workload = self.run, self.run.workload
        self.waits.append(run.cores.now - self.ends[-1])
        least = workload.settings.min_version(self.version)
        lags = Counter[int]()
        for record in records:
            for age, count in record.ages:
                if age >= least:
                    lags[self.version - age] += count
        self.lags.append(lags)
        self.tokens.append(sum(record.length for record in records))
        rows = self.tokens[-1] + workload.prompt_tokens * len(records)
        self.take(self.version + 1)
        seconds = run.costs.update_s + run.costs.token_s * rows / workload.ranks
        seconds += run.costs.sync_s if workload.ranks > 1 else 0.0
        seconds /= workload.threads
        for _ in range(workload.ranks):
            run.cores.work(seconds, self._rank_done, threads=workload.threads, on_core=workload.cores is not None)

    def _rank_done(self) -> None:
        assert self._done is not None, "an update is under way"
        self._done += 1
        self._end()

    def _end(self) -> None:
        if self._done != self.run.workload.ranks or self._pushing:
            return
        self._done, self._pushing = None, True
        self.version += 1
        self.ends.append(self.run.cores.now)
        published = partial(self._published, self.version)
        publish = partial(self.run.queue.call, self.run.costs.publish_s, published)
        self.run.cores.work(self.run.costs.push_s, publish)
        self._begin()

    def _published(self, version: int) -> None:
        self._pushing = False
        run, workload = self.run, self.run.workload
        run.queue.rules.publish(version)
        if workload.evaluation_every and version % workload.evaluation_every == 0:
            for actor in run.actors:
                actor.evaluate(version, workload.evaluation_prompts // workload.actors)
        run.queue.serve()
        for actor in run.actors:
            actor.pull(version)
        self._end()


class SimulatedRun:
    """All simulated stages of a run."""

    def __init__(self, workload: Workload, costs: StageCosts) -> None:
        self.workload, self.costs = workload, costs
        self.cores = SharedCores(workload.cores, DRIVER_CORES + costs.actor_cores * workload.actors)
        self.queue, self.learner = SimulatedQueue(self), SimulatedLearner(self)
        self.actors = [SimulatedActor(self, f"rollout-{number}") for number in range(workload.actors)]
        self._lengths = itertools.cycle(workload.lengths)

    def next_length(self) -> int:
        return next(self._lengths)

    def predict(self, skip: int, updates: int, most_s: float) -> Prediction:
        self.learner.take(0)
        for actor in self.actors:
            actor.ask()
        learner, begin = self.learner, (0.0, 0.0)
        while learner.version < skip + updates and (self.cores.now < most_s or learner.version <= skip + 1):
            before = learner.version
            self.cores.advance()
            if before < skip <= learner.version:
                begin = self.cores.now, sum(actor.engine.busy_s for actor in self.actors)
        seconds, state = learner.ends[-1] - learner.ends[skip], self.queue.rules.state
        busy_s = sum(actor.engine.busy_s for actor in self.actors) - begin[1]
        lost = sum(state.tokens[ending] for ending in ("too_old", "resampled")) + state.counts["masked_tokens"]
        return Prediction(
            updates_per_s=(learner.version - skip) / seconds,
            tokens_per_s=sum(learner.tokens[skip : learner.version]) / seconds,
            learner_waits=sum(learner.waits[skip : learner.version]) / seconds,
            engines_busy=busy_s / (self.cores.now - begin[0]) / self.workload.actors,
            tokens_lost=lost / max(1, state.tokens["delivered"]),
            lags=sum(learner.lags[skip : learner.version], Counter()),
        )


def _record(ticket: Ticket, actor: str, length: int, ages: Ages) -> TrajectoryRecord:
    return TrajectoryRecord(
        identity=ticket.identity,
        actor=actor,
        finish="stop",
        reward=float(ticket.identity.sample % 2),
        length=length,
        newest_version=ages[-1][0],
        ages=ages,
        **SHARD_COLUMNS,
    )
