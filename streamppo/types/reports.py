"""Numbers for people that every stage sends to the run."""

from typing import ClassVar

from streamppo.process import PhaseTime
from streamppo.types.crossing import WireStruct


class QueueReport(WireStruct, frozen=True):
    """The queue's counters since the run began, and what it holds at this moment.

    `tokens` is the ledger of the tokens that the policy sampled: those under `delivered` are as many as all others.
    `cut` segments are followed by others, or were to be: of those `orphaned`, the rest came to nothing.
    """

    version: int
    ready: int
    in_flight: int
    issued: int
    stored: int
    consumed: int
    duplicates: int
    dead_letters: int
    dropped: dict[str, int]
    masked_tokens: int
    failed: dict[str, int]
    mean_tokens_consumed: float
    mean_tokens_dropped: float
    tokens: dict[str, int]
    cut: int = 0
    orphaned: int = 0
    phases: dict[str, PhaseTime] = {}


class ScorerReport(WireStruct, frozen=True):
    """One actor's counters of a scorer, or of a teacher's server; `reasons` counts the first few kinds of failures."""

    name: str
    calls: int
    failed: int
    retries: int
    respawns: int
    mean_s: float
    max_s: float
    reasons: dict[str, int]


class Sample(WireStruct, frozen=True):
    """A scored completion for people: `LENGTH` characters of its prompt's end and of its own beginning, its version."""

    LENGTH: ClassVar[int] = 300
    prompt: str
    completion: str
    reward: float
    version: int


class EngineReport(WireStruct, frozen=True):
    """One rollout actor's counters since it started. Seconds are wall time; `idle_s` had nothing to decode.

    `too_long` counts the prompts that were skipped or truncated when the task was loaded, `restarts` the deaths of the
    engine's processes that it has survived, `stalls` the steps of environments that held the actor, by file and line,
    `agents` the requests of agents and what became of them. Of the `prompted` tokens of prompts `reused` came from the
    engine's cache, by the versions since they were computed in `kv_ages`; of the `context` tokens that earlier turns of
    an episode had, `context_reused` did. `sample` is its newest completion.
    """

    actor: str
    version: int
    tokens: int
    trajectories: int
    busy_s: float
    idle_s: float
    swaps: int
    swap_s: float
    push_ms: float
    checksum: str
    restarts: int = 0
    prompted: int = 0
    reused: int = 0
    context: int = 0
    context_reused: int = 0
    kv_ages: dict[int, int] = {}
    scorers: tuple[ScorerReport, ...] = ()
    too_long: dict[str, int] = {}
    stalls: dict[str, int] = {}
    agents: dict[str, int] = {}
    phases: dict[str, PhaseTime] = {}
    sample: Sample | None = None


class EvaluationReport(WireStruct, frozen=True):
    """One actor's greedy answers to held-out prompts; `failed` ones have no score, and are not part of `count`."""

    actor: str
    correct: int
    count: int
    failed: int
    min_version: int
    max_version: int


class UpdateReport(WireStruct, frozen=True):
    """The numbers of one update. `metrics` are named as in telemetry/catalogue.py."""

    version: int
    metrics: dict[str, float]
    lag_histogram: dict[int, int]
    phases: dict[str, PhaseTime] = {}
