"""The stages of a run: the driver starts them together, watches them, and replaces those that die.

a rollout actor dies or is silent      an actor with another name replaces it; unfinished samples are sampled again
the wanted number of actors changes    actors are added, or the newest are removed; this is not a restart
the queue dies                         Ray restarts it from its journal and repeats the unfinished calls
a reward model dies                    Ray restarts it; calls of rollout actors fail and may be retried
a learner rank dies or is silent       LearnerLost: the loop restarts all ranks from the newest checkpoint
too many restarts in a short time      RunError
"""

import itertools
import logging
import shutil
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import ray
from msgspec import structs
from ray import ObjectRef
from ray.actor import ActorProxy
from ray.exceptions import RayActorError, RayError

from streamppo import durable
from streamppo.config import file as configfile
from streamppo.config.model import BUILTIN
from streamppo.config.sections import LOCAL, Config, Watchdog, model_path
from streamppo.driver import run_folder
from streamppo.driver.ray import nodes, placement
from streamppo.driver.ray.actors import make_queue, make_ranks, make_rollout, make_shards
from streamppo.driver.ray.cluster import actor_id, call_in_actor, describe, kill, refuse_dead_ray
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.driver.ray.placement import Options, Placement, refuse_impossible
from streamppo.driver.watch.polling import Heartbeats, ReportPolling
from streamppo.driver.watch.rollout_pool import RolloutPool
from streamppo.driver.watch.watch import TICK_S, RunStage, WatchedCalls
from streamppo.errors import ConfigError, LearnerLost, RunError
from streamppo.learner.checkpoint import history, manifest, remote
from streamppo.learner.checkpoint.history import History
from streamppo.queue.actor import QueueActor
from streamppo.queue.batch_source import as_source
from streamppo.queue.shards.shard import QueueShard
from streamppo.rollout.actor import RolloutActor
from streamppo.tasks.rewards import reward_model
from streamppo.telemetry.host import MemoryKills
from streamppo.telemetry.record import RunRecord
from streamppo.terminal import counted
from streamppo.types import EngineReport, QueueReport, UpdateReport, decode, encode
from streamppo.weights import factory, store

TOGETHER_S = 30.0
"""If one failure cuts off several nodes, Ray declares all of them dead within this number of seconds."""

log = logging.getLogger(__name__)


class Stages:
    """A run's actors, all created at once. `rollouts` and `evaluators` have engines; `evaluators` only evaluate."""

    def __init__(self, config: Config, folder: Path, record: RunRecord, interrupts: Interrupts) -> None:
        self.config = config
        self.folder = folder
        self._record = record
        self._interrupts = interrupts
        self._restarts = Restarts(config.watchdog)
        self._memory = MemoryKills()
        self.calls = WatchedCalls(self._replace_dead, self._tick)
        self._actor_config = remote.config_for_actors(config, folder)
        self.address = self._actor_config.checkpoint.remote
        factory.create_folder(self._actor_config)
        self._shards = make_shards(config, folder)
        self.queue = make_queue(config, folder)
        self._placement = Placement(config)
        self._needs = nodes.rank_needs(self._actor_config, folder) if config.cluster.address != LOCAL else None
        # Ranks come first, because they have the most to do before the first update.
        self._groups = itertools.count()
        self.ranks = make_ranks(self._actor_config, as_source(self.queue), self._placement, next(self._groups))
        self._ranks_are_new = True
        self._loaded_ranks: dict[str, str] = {}
        self._reward_models = reward_model.create(config.reward, self._placement.model)
        shared = (self.queue, self.calls, self.note_restart, model_path(config, folder))
        self.rollouts = RolloutPool(
            lambda name, place: self._engine(name, place, self._placement.actor(place)), *shared
        )
        self.evaluators = RolloutPool(
            lambda name, place: self._engine(name, config.rollout.actors + place, self._placement.evaluator(place)),
            *shared,
            kind="evaluation",
        )
        self._heartbeats = Heartbeats(self.queue, self.calls, self._replace_silent, config.watchdog.heartbeat_s)
        self._reports = ReportPolling(self.queue, self.calls, record)
        self.rollouts.resize(config.rollout.actors)
        self.evaluators.resize(config.evaluation.actors)

    def begin(self, version: int) -> int:
        """Open the journal for a learner that starts from `version`; return the newest version of the run."""
        (newest,) = self.calls.wait([self.queue.begin.remote(version)], "opening the journal")
        self._follow(self.queue, "the queue died and was rebuilt from its journal")
        for number, shard in enumerate(self._shards):
            self._follow(shard, f"shard {number} of the queue died and was restarted", f"shard {number}")
        return newest

    def history(self) -> History:
        return history.read_history(self.folder, self._actor_config)

    def start_learner(self, checkpoint: Path | None) -> int:
        """Load the model and `checkpoint` in new ranks, push their version, return it, and start generation."""
        self._loaded_ranks = {}
        if not self._ranks_are_new:
            for rank in self.ranks:
                kill(rank)
            self.calls.forget(RunStage.CHECKPOINT)
            self.ranks = make_ranks(self._actor_config, as_source(self.queue), self._placement, next(self._groups))
        self._ranks_are_new = False
        if self._needs is not None:
            proofs = [call_in_actor(rank, nodes.check_visible, self._needs) for rank in self.ranks]
            self.calls.wait(proofs, "the check that ranks see the run's folder")
        model = model_path(self.config, self.folder)
        locations = [call_in_actor(rank, placement.locate) for rank in self.ranks]
        self.ranks = placement.in_order(self.ranks, self.calls.wait(locations, "the start of the learner's ranks"))
        if self.config.model.path == BUILTIN:
            self.calls.wait([self.ranks[0].make_model.remote(model)], "making builtin:tiny")
            store.bring_model(self._actor_config, model)
        address = self.ranks[0].rendezvous.remote()
        resume_from = str(checkpoint) if checkpoint else None
        past = encode(self.history())
        loading = [rank.setup.remote(n, address, model, resume_from, past) for n, rank in enumerate(self.ranks)]
        version = self.calls.wait(loading, "loading the model")[0]
        self._loaded_ranks = {actor_id(rank): f"learner-{number}" for number, rank in enumerate(self.ranks)}
        self.rollouts.generate()
        self.evaluators.generate()
        return version

    def note_restart(self, stage: RunStage, reason: str, who: str = "") -> None:
        """Record a restart of a stage, or of the actor `who` in it. Raises `RunError` after too many restarts."""
        watchdog = self.config.watchdog
        if killed := self._memory.explain():
            reason = f"{reason}: {killed}"
        if (count := self._restarts.add(who or stage, time.monotonic())) > watchdog.max_restarts:
            raise RunError(f"{counted(count, 'restart')} within {watchdog.restarts_s:g} s; the last reason: {reason}")
        self._record.restart(stage, reason)
        self.calls.reset_stall()

    def reports(self) -> tuple[QueueReport, list[EngineReport]]:
        engines: list[EngineReport] = []

        def collect(answer: bytes) -> None:
            engines.append(decode(answer, EngineReport))

        for handle in self.rollouts.at_work():
            self.calls.watch(handle.actor.report.remote(), RunStage.REPORT, collect)
        self.calls.drain(RunStage.REPORT)
        (queue,) = self.calls.wait([self.queue.report.remote()], "reports")
        return decode(queue, QueueReport), sorted(engines, key=lambda engine: engine.actor)

    def save_last(self, checkpoints: str) -> None:
        """Write a checkpoint of the learner's version, unless that takes longer than `watchdog.shutdown_s`."""
        self._record.tick("a last checkpoint")
        self.queue.stop.remote()
        refs = [rank.save.remote(checkpoints) for rank in self.ranks]
        refs += [rank.settle.remote() for rank in self.ranks]
        model = Path(model_path(self.config, self.folder))
        limit_s = self.config.watchdog.shutdown_s or manifest.seconds_to_write(Path(checkpoints), model)
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=limit_s)
        try:
            ray.get(ready)
        except RayError as error:
            # If one rank has failed, the others may wait in a collective operation forever.
            log.info("no last checkpoint: %s", describe(error))
            return
        if late:
            log.info("no checkpoint in time; the journal and the archive have everything since the last checkpoint")

    def finished_reports(self, updates: Iterable[ObjectRef[bytes]]) -> list[UpdateReport]:
        """Return the reports of those `updates` (calls to one rank) that ended before the learner stopped."""
        refs = list(updates)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=0)
        try:
            reports = [decode(answer, UpdateReport) for answer in ray.get(ready) if answer]
        except RayError as error:
            log.info("the last updates were not made: %s", describe(error))
            return []
        return sorted(reports, key=lambda report: report.version)

    def fetch_final(self) -> None:
        if self.config.cluster.own_disks:
            final = self.folder / store.FINAL
            with durable.naming(final, RunError):
                shutil.rmtree(final, ignore_errors=True)
            store.Store(self.address).fetch_folder(store.FINAL, final)

    def end(self) -> None:
        """Kill rollout actors and ranks before Ray ends the queue, because calls to an ended queue would fail."""
        with suppress(RunError):
            refuse_dead_ray()
            for actor in (*(handle.actor for handle in self.rollouts.handles + self.evaluators.handles), *self.ranks):
                kill(actor)
        factory.delete_folder(self._actor_config)

    def _engine(self, name: str, place: int, options: Options) -> "ActorProxy[RolloutActor]":
        """Create the actor of engine number `place`. Rollout actors have the first numbers, evaluators the next."""
        config = structs.replace(self._actor_config, rollout=self.config.rollout)
        actor = make_rollout(config, name, place, self.queue, self._reward_models, options)
        if self._needs is not None:
            proof = call_in_actor(actor, nodes.check_visible, nodes.rollout_needs(self._actor_config, self._needs))
            self.calls.watch(proof, RunStage.ROLLOUT, lambda _: None, name=name)
        return actor

    def _follow(
        self, actor: "ActorProxy[QueueActor] | ActorProxy[QueueShard]", reason: str, who: str = "", life: str = ""
    ) -> None:
        """Record a restart of the queue for each new process of `actor`. `life` is the id of its newest process."""

        def follow(another: str) -> None:
            if life:
                self.note_restart(RunStage.QUEUE, reason, who)
            self._follow(actor, reason, who, another)

        self.calls.watch(actor.new_process_id.remote(life), RunStage.QUEUE, follow)

    def _replace_dead(self, name: str, error: RayActorError) -> None:
        """Replace a rollout actor. Raises `LearnerLost` for a rank, `RunError` for a queue that Ray cannot restart."""
        if error.actor_id in {actor_id(rank) for rank in self.ranks}:
            raise LearnerLost(f"{name}: {describe(error)}") from error
        if error.actor_id in map(actor_id, (self.queue, *self._shards)):
            raise RunError(f"{RunStage.QUEUE}: {describe(error)}; resume starts another") from error
        for pool in (self.rollouts, self.evaluators):
            pool.replace(error.actor_id, describe(error))

    def _replace_silent(self, name: str, reason: str) -> None:
        if name in self._loaded_ranks:
            raise LearnerLost(f"{self._loaded_ranks[name]}: {reason}")
        for pool in (self.rollouts, self.evaluators):
            pool.replace(name, reason)

    def _tick(self, doing: str) -> None:
        self._interrupts.check()
        refuse_dead_ray()
        engines = self.rollouts.at_work() + self.evaluators.at_work()
        self._heartbeats.check([*(handle.name for handle in engines), *self._loaded_ranks])
        self._check_scale()
        self._reports.check(self.rollouts.at_work())
        self._record.tick(doing)
        self.calls.check_stall(self.config.watchdog.stall_s + self._starts_within(), doing, self._explain_stall)

    def _starts_within(self) -> float:
        if not self._loaded_ranks:
            return self.config.watchdog.load_s
        # An engine that takes longer than `start_s` raises its own error.
        at_work = self.rollouts.at_work()
        starting = self.rollouts.generating and (not at_work or any(handle.is_starting for handle in at_work))
        return self.config.rollout.engine.start_s if starting else 0.0

    def _explain_stall(self) -> str:
        try:
            queue = ray.get(self.queue.waiting_for.remote(), timeout=TICK_S)
        except RayError as error:
            queue = f"gives no answer ({describe(error)})"
        loading = ", ".join(self.rollouts.loading() + self.evaluators.loading()) or "none"
        return f"the queue {queue}; actors that have not started: {loading}{self._placement.waiting()}"

    def _check_scale(self) -> None:
        if not self.rollouts.generating:
            return
        try:
            if (actors := run_folder.accept(self.folder)) is None:
                return
            changed = configfile.change(self.config, [f"rollout.actors={actors}"])
            refuse_impossible(changed)
        except (ConfigError, RunError) as error:
            log.info("the number of rollout actors stays %d: %s", len(self.rollouts.handles), error)
        else:
            log.info("rollout actors: %d wanted, %d running", actors, len(self.rollouts.handles))
            configfile.save(changed, self.folder)
            self.config = changed
            self.rollouts.resize(actors)
        run_folder.answer(self.folder)


class Restarts:
    """Counts recent restarts. Deaths of different actors at about the same time count as one: a node may have died."""

    def __init__(self, watchdog: Watchdog) -> None:
        self._within_s = watchdog.restarts_s
        # Deaths that are further apart than `restarts_s` are not counted together.
        self._together_s = min(TOGETHER_S, watchdog.restarts_s)
        self._times_s: deque[float] = deque()
        self._group: set[str] = set()

    def add(self, who: str, present: float) -> int:
        """Count the death of `who` at `present` s. Returns the number of restarts within `watchdog.restarts_s`."""
        if not self._times_s or present - self._times_s[-1] > self._together_s or who in self._group:
            self._times_s.append(present)
            self._group.clear()
        self._group.add(who)
        while present - self._times_s[0] > self._within_s:
            self._times_s.popleft()
        return len(self._times_s)
