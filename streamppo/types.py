"""Everything that crosses a process, in the order in which a trajectory meets it.

    Prompt      tasks   -> rollout   one instance of a task, rebuilt from a ticket's identity
    Ticket      queue   -> rollout   sample this prompt once more
    Trajectory  rollout -> queue     the sampled tokens, with log-prob and weight version of each
    Failure     rollout -> queue     the ticket that came to nothing, and why
    Batch       queue   -> learner   the fixed number of trajectories that one update trains on
    Push        learner -> weights   a version's tensors, their hashes, and the layout of its buckets
    *Report     every stage -> run   numbers for people

Arrays travel as bytes columns (little-endian int32 / float32 / uint8), read with `ints`, `floats`, `flags`:
a thousand tokens cost less than a microsecond to encode, against tens for a list.
"""

import hashlib
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from streamppo.process import Spent

Ints: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]
Flags: TypeAlias = NDArray[np.bool_]
Routes: TypeAlias = NDArray[np.int16]
T = TypeVar("T")


class Crossing(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Base of what crosses a process: immutable, compared by value, and a tree, in which nothing makes a cycle."""


def encode(value: object) -> bytes:
    """`value` (a Crossing, or a tuple of them) as msgpack bytes."""
    return msgspec.msgpack.encode(value)


def decode(data: bytes | memoryview, kind: type[T]) -> T:
    """The inverse of `encode`. Raises `msgspec.ValidationError` when `data` is not a `kind`."""
    return msgspec.msgpack.decode(data, type=kind)


def utf8_safe(text: object) -> str:
    """`text` as UTF-8 can hold it, so that it can cross a process: half of a surrogate pair becomes a question mark."""
    return str(text).encode(errors="replace").decode()


def ints(column: bytes) -> Ints:
    """A bytes column of int32, as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<i4")


def floats(column: bytes) -> Floats:
    """A bytes column of float32, as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<f4")


def routes(column: bytes) -> Routes:
    """A bytes column of int16, as a read-only array without a copy."""
    return np.frombuffer(column, dtype="<i2")


def flags(column: bytes) -> Flags:
    """A bytes column of booleans, one byte each, as a read-only array without a copy."""
    return np.frombuffer(column, dtype=np.bool_)


class Message(Crossing, frozen=True):
    """One turn of a chat. `role` is system, user, assistant or tool."""

    role: str
    content: str


class Prompt(Crossing, frozen=True):
    """One instance of a task: `messages` for the chat template, or else `text`.

    `columns` is its data row, handed to rewards by name; `source` is the data set that it comes from. Of its tokens
    the last `max_tokens` are used.
    """

    text: str
    columns: dict[str, Any]
    messages: tuple[Message, ...] = ()
    source: str = ""
    max_tokens: int | None = None


class ScoredText(Crossing, frozen=True):
    """A trajectory as a reward sees it. `finish` is "length" when the completion was cut off.

    `num_tokens` is the number of tokens that the policy sampled, `tokens` their ids (int32). Of several turns, `turns`
    holds the policy's text of each, and `completion` all of it with the observations in between.
    """

    prompt: str
    completion: str
    finish: Literal["stop", "length"]
    num_tokens: int
    tokens: bytes = b""
    messages: tuple[Message, ...] = ()
    turns: tuple[str, ...] = ()
    source: str = ""

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens that the policy sampled."""
        return ints(self.tokens).tolist()


class Reward(Crossing, frozen=True):
    """The answer that a reward may return in place of a number. The trajectory's reward is the sum of all of it.

    `score` stands on the last token, `turns[k]` on the last token of turn k, `tokens[t]` on the t-th sampled token.
    `components` are logged, as reward_NAME, and compared by `gdpo` and `resample`. `explanation` is for people.
    """

    score: float = 0.0
    tokens: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    components: dict[str, float] = {}
    explanation: str = ""

    @property
    def total(self) -> float:
        """The trajectory's reward."""
        return self.score + sum(self.tokens) + sum(self.turns)


class Identity(Crossing, frozen=True, order=True):
    """The stable name of one trajectory; consumed at most once under it.

    `prompt` is the position in the task's endless, seeded stream of prompts, so that the configuration and the
    identity alone are enough to rebuild the prompt. `segment` counts the segments of an attempt; without any it is 0.
    """

    task: str
    prompt: int
    sample: int
    attempt: int = 0
    segment: int = 0


class Ticket(Crossing, frozen=True):
    """Leave to sample one trajectory. `slot` is its age: the order in which the queue issued it."""

    identity: Identity
    slot: int


class Trajectory(Crossing, frozen=True, omit_defaults=True):
    """One finished, scored completion, or a segment of one.

    All columns but `prompt_tokens`, `candidates` and `routes` have T entries, T >= 1.

    `mask` is true for tokens that the policy sampled; only those are ever trained on. `logprobs` are under
    the distribution that was sampled from, and `versions` say which weights sampled each token; without
    `versions_known`, the engine did not say it, and they are the oldest that it can have been. `reward` is the sum
    of `token_rewards`; where those are empty, all of it stands on the last token that the policy sampled.

    With top-p or top-k, `candidates` are the tokens that could have been sampled: those of token 0 in rising order,
    then those of token 1, and so on. `candidate_counts` says how many each token has; 0 stands for the whole
    vocabulary. Without either both are empty.

    `teacher_logprobs` are those of a teacher that is a server, 0 for tokens that the policy did not sample; without one
    they are empty. `routes` (int16, or empty) are the experts that the engine sent each token to, of the prompt's and
    its own but the last, layer by layer; -1 where it did not say. `explanation` is the reward's, its beginning.

    A segment that others follow has `finish` "cut" and no reward: that of the whole comes with the last one. The tokens
    of those before it are the last `prefix` of its `prompt_tokens`.
    """

    identity: Identity
    actor: str
    prompt_tokens: bytes
    tokens: bytes
    logprobs: bytes
    versions: bytes
    mask: bytes
    finish: Literal["stop", "length", "cut"]
    reward: float
    prefix: int = 0
    token_rewards: bytes = b""
    candidates: bytes = b""
    candidate_counts: bytes = b""
    teacher_logprobs: bytes = b""
    routes: bytes = b""
    components: dict[str, float] = {}
    explanation: str = ""
    versions_known: bool = True

    @property
    def num_tokens(self) -> int:
        """T, the length of the completion."""
        return len(self.tokens) // 4

    @property
    def num_sampled(self) -> int:
        """The tokens that the policy sampled, observations of an environment left out."""
        return len(self.mask) - self.mask.count(0)

    @property
    def oldest_version(self) -> int:
        """The version of the oldest token that the policy sampled."""
        return int(ints(self.versions)[flags(self.mask)].min())


class Failure(Crossing, frozen=True):
    """A ticket that came to nothing: where, why, and the tokens of completions that did come to their end."""

    identity: Identity
    actor: str
    stage: Literal["engine", "environment", "reward", "teacher", "task"]
    reason: str
    tokens: int = 0


class Batch(Crossing, frozen=True):
    """The trajectories that the update from `version` to `version + 1` trains on, in this order.

    Tokens sampled by a version below `min_version` are older than `max_lag` allows: they count in the
    denominators and stay out of the loss (`too_old = mask`; the other choices leave none in the batch). A part of a
    batch has the numbers of its `rows` (int32); a whole one has none.
    """

    version: int
    min_version: int
    rows: bytes = b""
    trajectories: tuple[Trajectory, ...] = ()


class Outline(Crossing, frozen=True):
    """A batch whose trajectories have no token ids; `prompt_lengths` [B] say how many tokens their prompts have."""

    batch: Batch
    prompt_lengths: bytes


class Tokens(Crossing, frozen=True):
    """The token ids and routes of one trajectory, as it has them; `row` is its place in the batch."""

    row: int
    prompt_tokens: bytes
    tokens: bytes
    candidates: bytes
    routes: bytes = b""


class Tensor(Crossing, frozen=True):
    """One parameter. `content` is the hash of its bytes, or of a rank's share of them (weights/content.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: int


class Piece(Crossing, frozen=True):
    """Bytes `first : first + nbytes` of a tensor, or their changes: `start : start + stored` of a bucket."""

    tensor: int
    first: int
    nbytes: int
    bucket: int
    start: int
    stored: int
    is_delta: bool = False


class Push(Crossing, frozen=True):
    """One version on its way to the engines, or one rank's share of it; deltas in it are to `base_version`.

    Tensors that are `frozen` do not travel: engines have them. `admitted_lag` comes with a lag that is steered.
    """

    version: int
    base_version: int | None
    tensors: tuple[Tensor, ...]
    pieces: tuple[Piece, ...]
    bucket_bytes: tuple[int, ...]
    admitted_lag: int | None = None
    rank: int = 0
    ranks: int = 1
    frozen: tuple[Tensor, ...] = ()

    @property
    def digest(self) -> str:
        """One hash (SHA-256) for a whole version: that of names, types, shapes and contents, however it was cut."""
        told = [(one.name, one.dtype, one.shape, one.content) for one in self.tensors + self.frozen]
        return hashlib.sha256(repr(told).encode()).hexdigest()


class Learned(Crossing, frozen=True):
    """The learner's numbers of each token of a batch, as the update begins: float32 without padding, or empty.

    `values` are the critic's; `proximal_logprobs` are under the learner's own policy, where a pass before the first
    step gives them; `advantages` are those of the loss, whitened if it wants them so.
    """

    values: bytes = b""
    proximal_logprobs: bytes = b""
    advantages: bytes = b""


class QueueReport(Crossing, frozen=True):
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
    phases: dict[str, Spent] = {}


class ScorerReport(Crossing, frozen=True):
    """One actor's counters of a scorer, or of a teacher's server; `reasons` counts the first few kinds of failures."""

    name: str
    calls: int
    failed: int
    retries: int
    respawns: int
    mean_s: float
    max_s: float
    reasons: dict[str, int]


class Sample(Crossing, frozen=True):
    """A scored completion for people: `LENGTH` characters of its prompt's end and of its own beginning, its version."""

    LENGTH: ClassVar[int] = 300
    prompt: str
    completion: str
    reward: float
    version: int


class EngineReport(Crossing, frozen=True):
    """One rollout actor's counters since it started. Seconds are wall time; `idle_s` had nothing to decode.

    `too_long` counts the prompts that were skipped or truncated when the task was loaded, `restarts` the deaths of the
    engine's processes that it has survived, `stalls` the steps of environments that held the actor, by file and line.
    `sample` is its newest completion.
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
    scorers: tuple[ScorerReport, ...] = ()
    too_long: dict[str, int] = {}
    stalls: dict[str, int] = {}
    phases: dict[str, Spent] = {}
    sample: Sample | None = None


class EvaluationReport(Crossing, frozen=True):
    """One actor's greedy answers to held-out prompts; `failed` ones have no score, and are not part of `count`."""

    actor: str
    correct: int
    count: int
    failed: int
    min_version: int
    max_version: int


class UpdateReport(Crossing, frozen=True):
    """The numbers of one update. `metrics` are named as in telemetry/catalogue.py."""

    version: int
    metrics: dict[str, float]
    lag_histogram: dict[int, int]
    phases: dict[str, Spent] = {}
