"""What tests share: the shipped configuration, and tiny trajectories."""

import logging
import os
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Before torch's first import, also in processes that tests start: threads that wait for each other on two busy cores
# take three times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.queue.rules.records import Counters, GroupShape
from streamppo.types import Identity, Trajectory

if TYPE_CHECKING:
    import driver_case as driver
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling

if not torch.cuda.is_available():
    # Without a GPU Triton interprets kernels, if that is asked for before its first import.
    os.environ["TRITON_INTERPRET"] = "1"
# As transformers' own switch, whose import takes two seconds.
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
# Before the tests of SGLang import what they share: its assertions say what they compared.
pytest.register_assert_rewrite("sglang_case")

REPOSITORY = Path(__file__).parent.parent
MATH = REPOSITORY / "configs" / "math.toml"
SUPPORT = REPOSITORY / "tests" / "support"
"""Programs and modules that tests share; pytest finds what is there by its name alone."""
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
"""A queue that has just opened eight slots."""


THIRDS = 3
LONGEST = (REPOSITORY / "tests" / "longest.txt").read_text().split()
"""The tests that take longest, by file or by name, in the order in which `pytest -n` starts them."""
APART = {name.partition("::")[0] for name in LONGEST}
SHARED_RUNS = "tests/integration/test_finished_run.py"
"""Its tests look at the same runs: they stay in one process."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--third", type=int, choices=range(THIRDS), help="run one third of the chosen tests")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest tests first; with `--third N` keep every third of those that `-m` chose, from number N on."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: min((order[name] for name in begins(item.nodeid) if name in order), default=len(order)))
    third = config.getoption("--third")
    if third is not None:
        config.hook.pytest_deselected(items=[item for n, item in enumerate(items) if n % THIRDS != third])
        items[:] = items[third::THIRDS]


def begins(nodeid: str) -> tuple[str, str, str]:
    """A test's own name, that without its parameters, and its file."""
    return nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    """Give out files in their order, but the long ones, other than that of shared runs, test after test."""
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return nodeid if file in APART and file != SHARED_RUNS else file

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


@pytest.fixture(scope="session", autouse=True)
def state_of_user(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A secret for the consent to runs' code that is not the user's; also of the processes that tests start."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def no_log_lines_of_another_process() -> Iterator[None]:
    """Actors that a test makes in its own process set up that process's log lines; they are gone after the test."""
    ours = logging.getLogger("streamppo")
    before = list(ours.handlers), ours.level, ours.propagate
    yield
    ours.handlers[:], ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


@pytest.fixture(autouse=True)
def databases_close(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the journals of queues after the test that made them in its own process: an actor never does."""
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
def logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """The package's log lines, also after a command has sent them to standard output."""
    monkeypatch.setattr(logging.getLogger("streamppo"), "propagate", True)
    caplog.set_level(logging.INFO, logger="streamppo")
    return caplog


@pytest.fixture
def driver_case(
    math_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> "Callable[..., driver.Case]":
    """The driver's stages without Ray, with a number of rollout actors and overrides."""
    import driver_case as driver

    def make(actors: int, *overrides: str) -> driver.Case:
        config = math_config(f"rollout.actors={actors}", "evaluation.prompts=1", *overrides)
        return driver.Case(config, tmp_path, monkeypatch)

    return make


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The learner tests' model."""
    import learner_case

    path = tmp_path_factory.mktemp("model")
    learner_case.save_model(path)
    return path


def save_reward_model(folder: Path, alphabet: str) -> None:
    """A small classifier with one output and a tokenizer for single characters, as `path` of a reward model."""
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
    """A process group of this process alone."""
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
    """A trajectory with the given columns; version 0 and log-prob -1 where nothing is said."""
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
