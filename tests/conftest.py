"""Shared fixtures and helpers: the shipped configuration, tiny trajectories, the order of the tests."""

import fcntl
import logging
import os
import resource
import shutil
import sqlite3
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

# Before torch's first import, also in processes that tests start: on two busy cores several threads take three times
# as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import pytest
import torch

from streamppo import process
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.queue.rules.records import Counters, GroupShape
from streamppo.types import Identity, Trajectory
from tests import durations

if TYPE_CHECKING:
    import driver_case as driver
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

# Most objects of a test's process are those of imported modules, which live as long as it does.
process.make_gc_rare()

if not torch.cuda.is_available():
    # Without a GPU Triton can interpret kernels, if this is set before its first import.
    os.environ["TRITON_INTERPRET"] = "1"
# Has the effect of transformers' own switch, whose import takes two seconds.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Before the tests of SGLang import the module: its failed assertions then show the compared values.
pytest.register_assert_rewrite("sglang_case")

REPOSITORY = Path(__file__).parent.parent
MATH = REPOSITORY / "configs" / "math.toml"
SUPPORT = REPOSITORY / "tests" / "support"
"""Shared programs and modules of tests; modules are imported by their bare names."""
COUNTERS = Counters(
    shape=GroupShape("t", 1, 1),
    version=0,
    opened=8,
    abandoned=0,
    counts={},
    tokens={},
    dropped={},
    failed={},
    fenced=(),
)
"""Counters of a queue that has just opened eight slots."""


MEMORY, ROOM_BYTES = Path("/dev/shm"), 2 * 2**30
"""Tests have their folders in memory if that much of it is free: a disk takes milliseconds for each flush.

Example: the tests of the queue's actor, journal and standby flush 25,000 times: 85 s on a disk, and 31 s in memory.
"""
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM_BYTES:
    # What pytest has for the folder above all folders of tests.
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

SLOW_S = 900
"""Several of them run at once, each of several processes, on a machine that may be busy."""
LONGEST = (REPOSITORY / "tests" / "longest.txt").read_text().split()
"""The longest tests, by file or by name, in the order in which `pytest -n` starts them."""
APART = {name.partition("::")[0] for name in LONGEST}
SHARED_RUNS = "tests/integration/test_finished_run.py"
"""Its tests share finished runs: they stay in one process."""


def pytest_report_header() -> str:
    return f"folders of tests: {os.environ.get('PYTEST_DEBUG_TEMPROOT') or tempfile.gettempdir()}"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=part, metavar="K/N", help="every N-th chosen test, from number K (0 to N - 1) on")


def part(text: str) -> slice:
    """The places of the tests of a part K/N. Raises `ValueError` for one that there is not."""
    number, _, parts = text.partition("/")
    if not 0 <= int(number) < int(parts):
        raise ValueError(text)
    return slice(int(number), None, int(parts))


class ChosenCases:
    """Makes all cases of a function slow but the `n` of its mark `sampled(n)`, and marks what is quick."""

    @pytest.hookimpl(tryfirst=True)  # before `-m` chooses
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        cases = defaultdict[tuple[str, int], list[pytest.Item]](list)
        for item in items:
            if (mark := item.get_closest_marker("sampled")) and not item.get_closest_marker("slow"):
                cases[begins(item.nodeid)[1], mark.args[0]].append(item)
        for (_, number), of_function in cases.items():
            for item in without_sample(of_function, number):
                item.add_marker("slow")
        long = durations.listed()
        for item in items:
            if begins(item.nodeid)[1] not in long and not any(map(item.get_closest_marker, ("slow", "sglang", "gpu"))):
                item.add_marker("quick")


def without_sample(items: Sequence[pytest.Item], number: int) -> list[pytest.Item]:
    """Draw `number` cases of a function by their names, first those with most values not yet drawn; return the rest."""
    rest, drawn = sorted(items, key=draw_order), set[tuple[str, int]]()
    for _ in range(min(number, len(rest))):
        chosen = max(rest, key=lambda item: len(values(item) - drawn))
        drawn |= values(chosen)
        rest.remove(chosen)
    return rest


def draw_order(item: pytest.Item) -> bytes:
    """An arbitrary order of cases by their names, the same in every checkout: some names have paths in it."""
    return sha256(item.nodeid.replace(str(REPOSITORY), "").encode()).digest()


def values(item: pytest.Item) -> set[tuple[str, int]]:
    """A case's parameters, each as (name, identity of its value): cases of one `parametrize` share their objects."""
    return {(name, id(value)) for name, value in cast("pytest.Function", item).callspec.params.items()}


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(ChosenCases())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest tests first; with `--part K/N` keep every N-th chosen test, from number K on.

    Slow tests without a time limit of their own get `SLOW_S`.
    """
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_S))
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: min((order[name] for name in begins(item.nodeid) if name in order), default=len(order)))
    places = config.getoption("--part")
    if places is not None:
        kept = items[places]
        del items[places]
        config.hook.pytest_deselected(items=items[:])
        items[:] = kept


def begins(nodeid: str) -> tuple[str, str, str]:
    """(a test's name, its name without parameters, its file)."""
    return nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    """Distribute files in order; long files, except that of the shared runs, are distributed test by test."""
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            self._crashed = set[str]()

        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in APART and file != SHARED_RUNS else file

        def remove_node(self, node: "WorkerController") -> str | None:
            pending = (name for unit in self.assigned_work[node].values() for name, done in unit.items() if not done)
            self._crashed.update(islice(pending, 1))
            return super().remove_node(node)

        def _reschedule(self, node: "WorkerController") -> None:
            # pytest-xdist itself would start a test that crashes its process again and again, and leave the new
            # process waiting: it starts its only test when it has a second one, or knows that there is none.
            for scope, unit in [*self.workqueue.items()]:
                unit.update(dict.fromkeys(self._crashed & unit.keys(), True))
                if all(unit.values()):
                    del self.workqueue[scope]
            for _ in range(2):
                super()._reschedule(node)

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


@pytest.fixture(scope="session", autouse=True)
def state_of_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A state folder, also for child processes, with its own secret for the consent to runs' code."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_log_lines_of_another_process() -> Iterator[None]:
    """Restore the log handlers after each test: actors in the test's process install some."""
    ours = logging.getLogger("streamppo")
    before = list(ours.handlers), ours.level, ours.propagate
    yield
    ours.handlers[:], ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


@pytest.fixture(autouse=True)
def databases_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the SQLite connections of each test: queues in its process never close theirs."""
    opened = list[sqlite3.Connection]()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    def noted(*given: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*given, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    yield
    for connection in opened:
        connection.close()


@pytest.fixture
def math_config() -> Callable[..., Config]:
    """configs/math.toml with overrides."""
    return lambda *overrides: configfile.load(MATH, overrides)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """4 GiB more than now, for a reader that nothing keeps from reading a hollow file or from counting for ever."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + 2**32, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The package's log lines, even after a command has directed them to standard output."""
    monkeypatch.setattr(logging.getLogger("streamppo"), "propagate", True)
    caplog.set_level(logging.INFO, logger="streamppo")
    return caplog


@pytest.fixture
def driver_case(
    math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> "Callable[..., driver.Case]":
    """A function (number of rollout actors, overrides) -> the driver's stages without Ray."""
    import driver_case as driver

    def make(actors: int, *overrides: str) -> driver.Case:
        config = math_config(f"rollout.actors={actors}", "evaluation.prompts=1", *overrides)
        return driver.Case(config, tmp_path, monkeypatch)

    return make


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the learner tests' model."""
    import learner_case

    path = tmp_path_factory.mktemp("model")
    learner_case.save_model(path)
    return path


@pytest.fixture(scope="session")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six updates at lag 0, with checkpoints of 2, 4 and 6; a test that changes it takes a copy.

    All processes of `pytest -n` share it: the first one makes it, under a lock.
    """
    import thread_run

    base = tmp_path_factory.getbasetemp()
    place = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "exact"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return place / "math" if place.exists() else thread_run.trained(place)


def save_reward_model(folder: Path, alphabet: str) -> None:
    """Save a small classifier with one output and a tokenizer of single characters, for `path` of a reward model."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    from streamppo.tasks.tokenizer import character_tokenizer

    torch.manual_seed(0)
    tokenizer = character_tokenizer(alphabet)
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, num_labels=1, pad_token_id=0, **sizes)
    Qwen2ForSequenceClassification(config).save_pretrained(folder)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group with only this process."""
    import learner_case

    with learner_case.group(0, 1, tmp_path / "store"):
        yield


def trajectory(
    tokens: Sequence[int],
    *,
    prompt: Sequence[int] = (3, 4, 5),
    number: int = 0,
    sample: int = 0,
    versions: Sequence[int] | None = None,
    logprobs: Sequence[float] | None = None,
    mask: Sequence[bool] | None = None,
    reward: float = 0.0,
    finish: str = "stop",
) -> Trajectory:
    """A trajectory with the given columns; by default version 0, log-prob -1, no masked tokens, and reward 0."""
    count = len(tokens)
    return Trajectory(
        identity=Identity(task="test", prompt=number, sample=sample),
        actor="rollout-0",
        prompt_tokens=np.asarray(prompt, np.int32).tobytes(),
        tokens=np.asarray(tokens, np.int32).tobytes(),
        logprobs=np.asarray([-1.0] * count if logprobs is None else logprobs, np.float32).tobytes(),
        versions=np.asarray([0] * count if versions is None else versions, np.int32).tobytes(),
        mask=np.asarray([True] * count if mask is None else mask, np.bool_).tobytes(),
        finish=finish,  # pyright: ignore[reportArgumentType]
        reward=reward,
    )
