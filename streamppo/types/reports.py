"""Reports: the numbers that every stage sends to the driver for display."""

from typing import ClassVar

from streamppo.process import PhaseTime
from streamppo.types.wire import WireStruct


class QueueReport(WireStruct, frozen=True):
    """The queue's counters since the run began, and the numbers of trajectories that it has at present.

    `tokens` counts sampled tokens by outcome; `delivered` is the sum of the others. `cut` segments have a successor,
    `orphaned` ones a failed successor. `skipped_prompts` counts prompts that `algorithm.curriculum` left out.
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
    skipped_prompts: int = 0
    phases: dict[str, PhaseTime] = {}


class ScorerReport(WireStruct, frozen=True):
    """One actor's counters of a scorer or a teacher's server. `reasons` counts failures by reason."""

    name: str
    calls: int
    failed: int
    retries: int
    respawns: int
    mean_s: float
    max_s: float
    reasons: dict[str, int]


class Sample(WireStruct, frozen=True):
    """A scored completion for display: the prompt's last and the completion's first `LENGTH` characters."""

    LENGTH: ClassVar[int] = 300
    prompt: str
    completion: str
    reward: float
    version: int


class EngineReport(WireStruct, frozen=True):
    """One rollout actor's counters since it started. Seconds are wall time. `idle_s` is time with nothing to decode.

    `too_long` counts prompts that were skipped or truncated when the task was loaded. `restarts` counts restarts of the
    engine's processes, and `is_starting` is true during one. `stalls` counts environment steps that blocked the actor,
    by file and line. `agents` counts requests of agents by outcome. `prompted` counts prompt tokens, `reused` counts
    prompt tokens that came from the engine's cache, and `kv_ages` counts the reused tokens by age in versions.
    `context` counts tokens of an episode's earlier turns, and `context_reused` counts such tokens that came from the
    cache. `sample` is the newest completion.
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
    is_starting: bool = False
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
    """An actor's greedy answers to held-out prompts: `count` were scored, `failed` were not, the first for `reason`."""

    actor: str
    correct: int
    count: int
    failed: int
    min_version: int
    max_version: int
    reason: str = ""


class UpdateReport(WireStruct, frozen=True):
    """The numbers of one update. telemetry/catalogue.py has the names of `metrics`."""

    version: int
    metrics: dict[str, float]
    lag_histogram: dict[int, int]
    phases: dict[str, PhaseTime] = {}
