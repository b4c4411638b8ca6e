"""A rank from its first call to its first update, without a model."""

from collections.abc import Callable
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from streamppo.config.sections import Config
from streamppo.learner import device, learner
from streamppo.learner import rank as module
from streamppo.learner.rank import Rank
from streamppo.learner.ulysses import WHOLE
from streamppo.queue.source import BEAT_S
from streamppo.types import encode


class Parts:
    """All that a rank is made of; each writes down what is asked of it. The queue hears `beats` by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.beats: list[str] = []
        self.paused_s: list[float] = []
        self.heard_twice = Event()
        self.version, self.own_rows = 7, None
        self.policy = SimpleNamespace(slices=WHOLE)
        note = SimpleNamespace(remote=lambda *_: "life")
        self.queue: Any = SimpleNamespace(another_life=note, beat=SimpleNamespace(remote=self.beat))
        for name in ("acquire", "join", "mesh_of", "expect_updates"):
            patch.setattr(device, name, self.noting(name))
        patch.setattr(learner, "build", lambda *_: (self.asked.append("build"), self)[1])
        patch.setattr(module, "time", SimpleNamespace(sleep=self.sleep))
        patch.setattr(module.ray, "get", lambda ref: ref)
        patch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "my id"))
        patch.setattr(Rank, "_follow_queue", lambda *_: None)
        self.push, self.start = self.noting("push"), self.noting("fetch")

    def noting(self, name: str) -> Callable[..., Any]:
        return lambda *_, **__: self.asked.append(name) or SimpleNamespace(type="cpu")

    def beat(self, actor: str) -> None:
        self.beats.append(actor)

    def sleep(self, seconds: float) -> None:
        self.paused_s.append(seconds)
        if len(self.beats) == 2:
            self.heard_twice.set()
            Event().wait()


def test_a_rank_that_has_loaded_has_short_limits_and_gives_signs_of_life_under_the_name_that_the_driver_knows(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    made: Any = Rank(encode(math_config()), 0, parts.queue, 0)
    made._fetcher = parts
    assert made.setup(("127.0.0.1", 1), "model", None) == 7
    assert parts.asked == ["acquire", "join", "mesh_of", "build", "expect_updates", "push", "fetch"]
    # No call of the rank runs: it is a thread beside them that tells.
    assert parts.heard_twice.wait(60)
    assert parts.beats == ["my id", "my id"]
    assert parts.paused_s == [BEAT_S, BEAT_S]
