"""The driver without Ray: a call is a string, "actor.method(arguments)", and a test sets its value."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError, RayActorError

from streamppo.config.sections import Config
from streamppo.driver import run_folder, stages
from streamppo.driver.ray.placement import Location
from streamppo.driver.watch import polling, watch
from streamppo.errors import RunError
from streamppo.telemetry.live.display import PlainLines


class Actor:
    """The handle of an actor; `actor.method.remote(1, 2)` returns "name.method(1, 2)"."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._actor_id = self

    def hex(self) -> str:
        return id_of(self.name)

    def __getattr__(self, method: str) -> "Method":
        if method.startswith("__"):
            raise AttributeError(method)
        return Method(f"{self.name}.{method}")


class Method:
    def __init__(self, of: str) -> None:
        self._of = of

    def remote(self, *arguments: Any) -> str:
        return f"{self._of}({', '.join(map(str, arguments))})"


def id_of(name: str) -> str:
    return f"id of {name}"


class FakeRay:
    """Replaces ray.get, ray.wait and ray.kill; `now` is the driver's clock, which advances while the driver waits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.values: dict[str, Any] = {}
        self.dead: set[str] = set()
        self.killed: list[str] = []
        self.now = 1000.0
        patch.setattr(ray, "get", self.get)
        patch.setattr(ray, "wait", self.wait)
        patch.setattr(ray, "kill", lambda actor: self.killed.append(actor.name))
        patch.setattr(ray, "cluster_resources", lambda: {"CPU": 2.0, "GPU": 1.0})
        for module in (watch, polling, stages):
            patch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now))

    def get(self, refs: Any, timeout: float | None = None) -> Any:
        if isinstance(refs, list):
            return [self.get(ref) for ref in refs]
        name = refs.split(".")[0]
        if name in self.dead:
            raise RayActorError(id_of(name), f"{name} has died")
        if refs not in self.values:
            raise GetTimeoutError(refs)
        if isinstance(self.values[refs], Exception):
            raise self.values[refs]
        return self.values[refs]

    def wait(self, refs: Sequence[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert len(set(refs)) == len(refs), "Ray wants each of them once"
        ready = [ref for ref in refs if ref in self.values or ref.split(".")[0] in self.dead][:num_returns]
        if not ready:
            self.now += timeout
        return ready, [ref for ref in refs if ref not in ready]


class Recorded:
    """A record that writes no files."""

    def __init__(self) -> None:
        self.restarts: list[tuple[str, str]] = []
        self.evaluated = set[int]()

    version = 0

    @property
    def complete_to(self) -> int:
        return self.version

    display = PlainLines()

    def queue(self, report: object) -> None:
        """Ignore the queue's counters."""

    def engine(self, report: object) -> None:
        """Ignore the counters of a rollout actor."""

    def tick(self, doing: str) -> None:
        """Do nothing while the driver waits."""

    def begin(self, version: int) -> None:
        """Ignore the version with which the learner begins."""

    def drop_unpublished(self, newest: int) -> None:
        """Keep what was recorded: all of it was published."""

    def restart(self, stage: str, reason: str) -> None:
        self.restarts.append((stage, reason))


class Case:
    """`Stages` on `FakeRay`, with loaded rollout actors; after `with_model`, the learner is loaded too."""

    def __init__(self, config: Config, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.ray = FakeRay(patch)
        self.folder = folder
        self.record: Any = Recorded()
        interrupts: Any = SimpleNamespace(check=lambda: None)
        place = SimpleNamespace(model=None, actor=lambda number: {}, evaluator=lambda number: {}, waiting=str)
        patch.setattr(stages, "make_queue", lambda *_: Actor("queue"))
        patch.setattr(stages, "make_rollout", lambda config, name, place, *_: Actor(name))
        patch.setattr(stages, "make_ranks", lambda config, queue, place, group: [Actor(f"learner-0.{group}")])
        patch.setattr(stages, "Placement", lambda config: place)
        patch.setattr(stages.reward_model, "create", lambda *_: {})
        patch.setattr(stages, "encode", lambda past: "past")
        patch.setattr(stages, "call_in_actor", lambda actor, function, *_: f"{actor.name}.{function.__name__}()")
        self.stages: Any = stages.Stages(config, folder, self.record, interrupts)
        self.rollouts, self.calls = self.stages.rollouts, self.stages.calls
        self.rollouts.generate()
        self.stages.evaluators.generate()
        self.load_all()

    def load_all(self) -> None:
        """Let every starting rollout actor finish loading."""
        for ref in self.watched(".start("):
            self.answer(ref, 0)

    def with_model(self) -> "Case":
        """Let a new group of ranks finish loading its model."""
        group = self.stages.ranks[0].name if self.stages._ranks_are_new else "learner-0.1"
        model = self.folder / "model"
        self.ray.values |= {
            f"{group}.locate()": Location("10.0.0.1", "a", []),
            f"{group}.make_model({model})": None,
            f"{group}.setup(0, {group}.rendezvous(), {model}, None, past)": 0,
        }
        self.stages.start_learner(None)
        return self

    def answer(self, ref: str, value: Any) -> None:
        self.ray.values[ref] = value
        self.calls._handle(ref, "a test", [])
        del self.ray.values[ref]

    def die(self, name: str) -> None:
        """Fail all calls of the actor that are under way."""
        self.ray.dead.add(name)
        for ref in self.watched(f"{name}."):
            if ref in self.calls._watched:
                self.calls._handle(ref, "a test", [])

    def scale(self, wanted: int) -> None:
        """Request `wanted` rollout actors as the command does, and let the driver notice."""
        with run_folder.driver_lock(self.folder), pytest.MonkeyPatch.context() as patch:
            patch.setattr(run_folder, "WAIT_S", 0)
            with pytest.raises(RunError, match="no answer"):
                run_folder.scale(self.folder, wanted)
        self.tick()

    def tick(self, doing: str = "a test") -> None:
        self.stages._tick(doing)

    def wait(self, seconds: float, doing: str = "a test") -> None:
        """Let time pass in a driver that runs."""
        for _ in range(round(seconds / watch.TICK_S)):
            self.ray.now += watch.TICK_S
            self.tick(doing)

    def names(self) -> list[str]:
        return [handle.name for handle in self.rollouts.handles]

    def watched(self, part: str) -> list[str]:
        return [ref for ref in self.calls._watched if part in ref]
