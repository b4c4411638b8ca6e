"""The types that processes exchange, in the order in which a trajectory passes through the pipeline.

    Prompt      tasks   -> rollout   one instance of a task, computed again from a ticket's identity
    Ticket      queue   -> rollout   permission to sample one trajectory of a prompt
    Trajectory  rollout -> queue     the sampled tokens, each with its log-prob and weight version
    Failure     rollout -> queue     a ticket that failed, and the reason
    Batch       queue   -> learner   the fixed number of trajectories of one update
    Push        learner -> weights   a version's tensors, their hashes, and the layout of its buckets
    *Report     every stage -> run   numbers for display

Arrays travel as bytes columns (little-endian int32, float32 or uint8), which `ints`, `floats` and `flags` read.
"""

import hashlib
from typing import Any, Literal, TypeAlias

from streamppo.types.reports import EngineReport as EngineReport
from streamppo.types.reports import EvaluationReport as EvaluationReport
from streamppo.types.reports import QueueReport as QueueReport
from streamppo.types.reports import Sample as Sample
from streamppo.types.reports import ScorerReport as ScorerReport
from streamppo.types.reports import UpdateReport as UpdateReport
from streamppo.types.wire import Flags as Flags
from streamppo.types.wire import Floats as Floats
from streamppo.types.wire import Ints as Ints
from streamppo.types.wire import Routes as Routes
from streamppo.types.wire import WireStruct
from streamppo.types.wire import decode as decode
from streamppo.types.wire import encode as encode
from streamppo.types.wire import flags as flags
from streamppo.types.wire import floats as floats
from streamppo.types.wire import ints as ints
from streamppo.types.wire import utf8_safe as utf8_safe

JsonObject: TypeAlias = dict[str, Any]


class Message(WireStruct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """One turn of a chat; `content` is None if it only calls tools. `fields` has other fields for the chat template."""

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[JsonObject, ...] = ()
    tool_call_id: str | None = None
    fields: JsonObject = {}

    def __hash__(self) -> int:
        """Return a hash of role and content: the other fields contain dicts, which have no hash."""
        return hash((self.role, self.content))

    @property
    def text(self) -> str:
        return self.content or ""

    def plain(self) -> JsonObject:
        """Return the message as a dict of its set fields. Chat templates and TRL's rewards expect this form."""
        optional = {"name": self.name, "tool_calls": list(self.tool_calls), "tool_call_id": self.tool_call_id}
        filled = {key: value for key, value in optional.items() if value}
        return {"role": self.role, "content": self.content, **self.fields, **filled}


class Template(WireStruct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """Inputs of a chat template, except the messages: `arguments` by name, and the JSON schemas of `tools`.

    `control_tokens`: a control token's name in a message is tokenized as plain text ("text") or as the token ("parse").
    """

    arguments: JsonObject = {}
    tools: tuple[JsonObject, ...] = ()
    control_tokens: Literal["text", "parse"] = "text"

    def __hash__(self) -> int:
        return hash(self.control_tokens)


class Prompt(WireStruct, frozen=True):
    """One instance of a task. Rewards get the data row `columns`; engines get the last `max_tokens` tokens."""

    text: str
    columns: JsonObject
    messages: tuple[Message, ...] = ()
    source: str = ""
    max_tokens: int | None = None
    template: Template = Template()


class ScoredText(WireStruct, frozen=True):
    """A trajectory as rewards get it. `finish` is "length" if the completion was truncated.

    `num_tokens` counts the sampled tokens, and `tokens` has their ids (int32). In an episode of several turns, `turns`
    has the policy's text of each turn, and `completion` the texts of all turns and observations. `messages` are the
    messages of a chat prompt. `observations` are the environment's messages after each turn except the last.
    """

    prompt: str
    completion: str
    finish: Literal["stop", "length"]
    num_tokens: int
    tokens: bytes = b""
    messages: tuple[Message, ...] = ()
    turns: tuple[str, ...] = ()
    source: str = ""
    observations: tuple[tuple[Message, ...], ...] = ()

    @property
    def prompt_messages(self) -> tuple[Message, ...]:
        """The prompt's messages. A final assistant message is left out, because the completion continues it."""
        return self.messages[:-1] if self._prefill else self.messages

    @property
    def completion_messages(self) -> tuple[Message, ...]:
        """The messages after the prompt: the policy's turns and the observations. Empty if the prompt is not a chat."""
        if not self.messages:
            return ()
        first, *later_turns = self.turns or (self.completion,)
        turns = [Message(role="assistant", content=text) for text in (self._prefill + first, *later_turns)]
        # A truncated trajectory may end with an observation.
        between = (*self.observations, *[()] * (len(turns) - len(self.observations)))
        return tuple(
            message for turn, observation in zip(turns, between, strict=True) for message in (turn, *observation)
        )

    @property
    def _prefill(self) -> str:
        return self.messages[-1].text if self.messages and self.messages[-1].role == "assistant" else ""

    @property
    def token_ids(self) -> list[int]:
        return ints(self.tokens).tolist()


class Reward(WireStruct, frozen=True):
    """A reward with parts. The trajectory's reward is `total`, the sum of `score`, `turns` and `tokens`.

    `score` is placed on the last token, `turns[k]` on the last token of turn k, and `tokens[t]` on sampled token t.
    Each of `components` is logged as reward_NAME, and used by `gdpo` and `resample`. The user sees `explanation`.
    """

    score: float = 0.0
    tokens: tuple[float, ...] = ()
    turns: tuple[float, ...] = ()
    components: dict[str, float] = {}
    explanation: str = ""

    @property
    def total(self) -> float:
        return self.score + sum(self.tokens) + sum(self.turns)


class Identity(WireStruct, frozen=True, order=True):
    """The stable name of one trajectory. The queue delivers at most one trajectory of each identity to the learner.

    `prompt` is an index in the task's endless stream of prompts. The stream is seeded, so the configuration and the
    identity determine the prompt. `segment` numbers the segments of an attempt; it is 0 without segments.
    """

    task: str
    prompt: int
    sample: int
    attempt: int = 0
    segment: int = 0


class Ticket(WireStruct, frozen=True):
    """Permission to sample one trajectory. `slot` is the number of its slot; older slots have smaller numbers."""

    identity: Identity
    slot: int


class Trajectory(WireStruct, frozen=True, omit_defaults=True):
    """One finished and scored completion, or a segment of it.

    T is the number of completion tokens, at least 1. Each column has T entries, one for each completion token, except
    `prompt_tokens`, `candidates`, `routes`, `branches` and `turns`.

    `mask` is true for tokens that the policy sampled. Only these tokens are trained on. `logprobs` are log-probs under
    the sampling distribution. `versions` are the weight versions that sampled each token. `reward` is the sum of
    `token_rewards`. If `token_rewards` is empty, the reward belongs to the last sampled token.

    With top-p or top-k, `candidates` lists the token ids that could have been sampled: first those of token 0 in
    ascending order, then those of token 1, and so on. `candidate_counts` has the number of candidates of each token; 0
    means the whole vocabulary. Without top-p and top-k both columns are empty.

    `teacher_logprobs` come from a teacher that runs as a server, and are 0 for tokens that were not sampled. The column
    is empty without such a teacher. `routes` lists the experts of each token of the row except the last, layer by
    layer, in numbers of `route_bytes` bytes (types/routes.py). `routes` is empty if the engine reports no experts.
    `explanation` is the beginning of the reward's explanation.

    The row is the prompt and the completion. `branches` makes it a tree (types/branches.py): a pair of int32 (start,
    parent) says that token `start` follows token `parent`, or no token (-1). Without branches each token follows the
    previous one. The tokens are in the order of sampling. `turns` lists the turns of an agent, including turns that the
    agent did not receive (types/turns.py). `source` is the prompt's `source`, if the task has several data sets.

    If more segments follow, `finish` is "cut" and there is no reward. The last segment has the reward of the
    completion. The last `prefix` tokens of `prompt_tokens` are tokens of earlier segments.
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
    route_bytes: int = 2
    branches: bytes = b""
    turns: bytes = b""
    components: dict[str, float] = {}
    explanation: str = ""
    source: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 4

    @property
    def num_sampled(self) -> int:
        return len(self.mask) - self.mask.count(0)

    @property
    def oldest_version(self) -> int:
        return int(ints(self.versions)[flags(self.mask)].min())


class Failure(WireStruct, frozen=True):
    """A failed ticket. `tokens` counts finished completions; `version` is the engine's at the start (-1: unknown)."""

    identity: Identity
    actor: str
    stage: Literal["engine", "environment", "reward", "teacher", "task"]
    reason: str
    tokens: int = 0
    version: int = -1
    source: str = ""


class Batch(WireStruct, frozen=True):
    """The trajectories of the update from `version` to `version + 1`, in order.

    Tokens sampled by a version below `min_version` exceed `max_lag`. They count in denominators, but have no loss. Only
    batches with `too_old = mask` have such tokens. If this is a part of a batch, `rows` (int32) has the indices of its
    trajectories in the whole batch; otherwise `rows` is empty.
    """

    version: int
    min_version: int
    rows: bytes = b""
    trajectories: tuple[Trajectory, ...] = ()


class Outline(WireStruct, frozen=True):
    """A batch without token ids. `prompt_lengths` [B] (int32) has the number of prompt tokens of each trajectory."""

    batch: Batch
    prompt_lengths: bytes


class Tokens(WireStruct, frozen=True):
    """The token ids and routes of the trajectory at index `row` of the batch; the columns are those of `Trajectory`."""

    row: int
    prompt_tokens: bytes
    tokens: bytes
    candidates: bytes
    routes: bytes = b""
    route_bytes: int = 2


class Tensor(WireStruct, frozen=True):
    """One parameter. `content` is the hash of its bytes, or of a rank's shard of it (weights/content.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: int


class TensorChunk(WireStruct, frozen=True):
    """Bytes `first : first + nbytes` of a tensor, stored in bytes `start : start + stored` of a bucket."""

    tensor: int
    first: int
    nbytes: int
    bucket: int
    start: int
    stored: int
    is_delta: bool = False


class Push(WireStruct, frozen=True):
    """A version or one rank's share of it. Deltas are relative to `base_version`; `frozen` tensors are not sent."""

    version: int
    base_version: int | None
    tensors: tuple[Tensor, ...]
    pieces: tuple[TensorChunk, ...]
    bucket_bytes: tuple[int, ...]
    admitted_lag: int | None = None
    rank: int = 0
    ranks: int = 1
    frozen: tuple[Tensor, ...] = ()

    @property
    def digest(self) -> str:
        """The SHA-256 of a version's names, dtypes, shapes and content hashes. Sharding does not change it."""
        described = [(tensor.name, tensor.dtype, tensor.shape, tensor.content) for tensor in self.tensors + self.frozen]
        return hashlib.sha256(repr(described).encode()).hexdigest()


class TokenRecord(WireStruct, frozen=True):
    """The learner's float32 numbers for each completion token of a batch at the start of its update, without padding.

    `values` come from the critic, and `proximal_logprobs` from a pass before the first step. `advantages` are those in
    the loss, whitened if configured. A column that was not computed is empty.
    """

    values: bytes = b""
    proximal_logprobs: bytes = b""
    advantages: bytes = b""
