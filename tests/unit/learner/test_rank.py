"""A rank from its first call to its first update, without a model."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from threading import Event, Thread, get_ident
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamppo.config.sections import Config
from streamppo.errors import RunError
from streamppo.learner import device, learner
from streamppo.learner import rank as module
from streamppo.learner.checkpoint.history import History
from streamppo.learner.parallel.context_parallel import WHOLE
from streamppo.learner.rank import Rank
from streamppo.queue.batch_source import BEAT_S
from streamppo.types import TokenRecord, UpdateReport, decode, encode
from streamppo.weights.pusher import PushedVersion

HOURS_S = 1e4


class Parts:
    """The parts of a rank; each records its calls. The queue gets `beats` by name."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.beats: list[str] = []
        self.paused_s: list[float] = []
        self.heard_twice = Event()
        self.built: list[tuple[float, str | None]] = []
        self.loaded: Callable[[str | None], int] = lambda resume_from: 7 if resume_from else 0
        self.rank_rows = None
        self.policy, self.mesh = SimpleNamespace(slices=WHOLE), None
        note = SimpleNamespace(remote=lambda *_: "life")
        self.queue: Any = SimpleNamespace(new_process_id=note, beat=SimpleNamespace(remote=self.beat))
        for name in ("acquire", "join", "mesh_of", "expect"):
            patch.setattr(device, name, self.noting(name))
        patch.setattr(learner, "build", self.build)
        patch.setattr(module, "time", SimpleNamespace(sleep=self.sleep, monotonic=lambda: HOURS_S))
        patch.setattr(module.ray, "get", lambda ref: ref)
        patch.setattr(module.ray, "get_runtime_context", lambda: SimpleNamespace(get_actor_id=lambda: "my id"))
        patch.setattr(Rank, "_follow_queue", lambda *_: None)
        self.push, self.start = self.noting("push"), self.noting("fetch")

    def build(self, config: Config, model: str, mesh: object, publish: object, resume_from: str | None, *_: Any) -> Any:
        self.asked.append("build")
        self.built.append((config.learner.lr, resume_from))
        self.config, self.version = config, self.loaded(resume_from)
        return self

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
    parts, config = Parts(monkeypatch), math_config()
    made: Any = Rank(encode(config), parts.queue, 0)
    made._fetcher = parts
    assert made.setup(0, ("127.0.0.1", 1), "model", "checkpoints/00000007", encode(History({0: config}))) == 7
    assert parts.asked == ["acquire", "join", "mesh_of", "build", "expect", "push", "fetch"]
    # No call of the rank runs: it is a thread beside them that tells.
    assert parts.heard_twice.wait(60)
    assert parts.beats == ["my id", "my id"]
    assert parts.paused_s == [BEAT_S, BEAT_S]


@pytest.mark.parametrize("since_s", [HOURS_S - 600, HOURS_S - 1])
def test_the_place_of_a_hanging_update_is_logged_once(
    since_s: float,
    math_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    parts = Parts(monkeypatch)
    made: Any = Rank(encode(math_config("watchdog.stall_s=300")), parts.queue, 0)
    made._computed = module._ComputedUpdate(3, get_ident(), since_s)
    Thread(target=made._beat, daemon=True).start()
    assert parts.heard_twice.wait(60)
    logged = [line for line in capsys.readouterr().out.splitlines() if "has taken" in line]
    assert len(logged) == (HOURS_S - since_s > 300)
    for line in logged:
        assert line.startswith("learner: warning: update 3 has taken more than 270 s, and is in threading.py:")
        assert " test_the_place_of_a_hanging_update_is_logged_once" in line


@pytest.mark.parametrize(("rank", "sent"), [(0, TokenRecord(advantages=b"1234")), (1, None)])
def test_the_first_rank_sends_the_numbers_of_the_batch_for_all(
    rank: int, sent: TokenRecord | None, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, records = math_config(), list[bytes]()
    made: Any = Rank(encode(config), Parts(monkeypatch).queue, 0)
    made._rank = rank
    monkeypatch.setattr(module, "time", time)
    batch = SimpleNamespace(version=0, to=lambda device: None)
    made._fetcher = SimpleNamespace(
        result=lambda: SimpleNamespace(batch=batch, lags={}, fetch_s=0.0), start=lambda *_: None
    )
    updater = SimpleNamespace(
        device=None, update=lambda batch: None, token_record=lambda updated: TokenRecord(advantages=b"1234")
    )
    made._built = SimpleNamespace(
        **{"version": 0, "config": config, "rank_rows": None, "updater": updater},
        saver=SimpleNamespace(check=lambda: None),
        follow_schedule=lambda lags: 1.0,
        metrics=lambda updated: {},
        adapt=lambda *_: {},
        speed=lambda *_: {},
        push=lambda record: records.append(record) or PushedVersion("", 0.0, 0),
    )
    assert decode(made.update(), UpdateReport).version == 1
    assert records == [b"" if sent is None else encode(sent)]


def test_a_rank_that_sees_the_gpus_of_the_others_is_refused_before_it_uses_one(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, configs = Parts(monkeypatch), [math_config(f"learner.gpus={gpus}") for gpus in (1, 0)]
    monkeypatch.setattr(module.process, "compile_caches", dict)
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    on_gpu, on_cpu = (Rank(encode(config), parts.queue, 0) for config in configs)
    on_gpu._fetcher = on_cpu._fetcher = parts  # pyright: ignore[reportAttributeAccessIssue]
    call = 0, ("127.0.0.1", 1), "model", None
    with pytest.raises(RunError, match=r"a rank sees 8 GPUs, .* unset RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"):
        on_gpu.setup(*call, encode(History({0: configs[0]})))
    assert parts.asked == []
    on_cpu.setup(*call, encode(History({0: configs[1]})))


@pytest.mark.parametrize(
    ("gpus", "by_the_user", "expected"),
    [
        ("0", {}, {}),
        ("1", {}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ("1", {"PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8"}, None),
        ("1", {"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_memory_of_a_gpu_grows_in_place_unless_the_user_says_how_it_is_given_out(
    gpus: str,
    by_the_user: dict[str, str],
    expected: dict[str, str] | None,
    math_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Tested in test_caches.py.
    monkeypatch.setattr(module.process, "compile_caches", dict)
    for name in module.ALLOCATOR:
        # Set first, so that it is taken back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in by_the_user.items():
        monkeypatch.setenv(name, value)
    Rank(encode(math_config(f"learner.gpus={gpus}")), Parts(monkeypatch).queue, 0)
    found = {name: os.environ[name] for name in module.ALLOCATOR if name in os.environ}
    assert found == (by_the_user if expected is None else expected)


def test_torch_is_imported_by_a_rank_and_not_with_its_class() -> None:
    code = "import streamppo.learner.rank, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PAST = {0: "learner.lr=0.5", 3: "learner.lr=0.25", 8: "learner.lr=0.125"}


def rank_of(parts: Parts, past: History) -> Any:
    made: Any = Rank(encode(past.configs[max(past.configs)]), parts.queue, 0)
    made._fetcher = parts
    return made


@pytest.mark.parametrize(
    ("asked", "whole", "built"),
    [
        (None, 0, [(0.5, None)]),
        ("/c/00000007", 7, [(0.25, "/c/00000007")]),
        ("/c/00000009", 9, [(0.125, "/c/00000009")]),
        # Checkpoint 7 is damaged: that of version 5 had the same configuration, that of version 2 another one.
        ("/c/00000007", 5, [(0.25, "/c/00000007")]),
        ("/c/00000007", 2, [(0.25, "/c/00000007"), (0.5, "/c/00000002")]),
        ("/c/00000007", 0, [(0.25, "/c/00000007"), (0.5, None)]),
        ("/c/00000002", 0, [(0.5, "/c/00000002"), (0.5, None)]),
    ],
)
def test_a_rank_is_built_as_it_was_configured_at_the_version_that_it_loads(
    asked: str | None,
    whole: int,
    built: list[tuple[float, str | None]],
    math_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = Parts(monkeypatch)
    parts.loaded = lambda resume_from: min(whole, int(resume_from[-8:])) if resume_from else 0
    past = History({version: math_config(change) for version, change in PAST.items()})
    assert rank_of(parts, past).setup(0, ("127.0.0.1", 1), "model", asked, encode(past)) == whole
    assert parts.built == built


def test_a_configuration_holds_from_its_version_on_and_its_batch_is_fetched_once_it_does(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, configured, limits = Parts(monkeypatch), list[tuple[int, float]](), list[object]()
    monkeypatch.setattr(device, "expect", lambda timeout, *_: limits.append((timeout, len(configured))))
    past = History({version: math_config(change, "updates=10") for version, change in PAST.items()})
    rank = rank_of(parts, past)
    rank._history = past
    learner: Any = parts
    learner.configure = lambda config: configured.append((learner.version, config.learner.lr))
    for learner.version in range(1, 11):
        rank._follow_history(learner)
    assert configured == [(3, 0.25), (8, 0.125)] and parts.asked.count("fetch") == 2
    assert limits[:2] == [(device.LOAD, 0), (device.UPDATE, 1)], "it may load a teacher"
