"""Everything that crosses a process, in the order of a trajectory's life.

    Prompt      tasks   -> rollout   one instance of a task, rebuilt from a ticket's identity
    Ticket      queue   -> rollout   permission to sample one trajectory of a prompt
    Trajectory  rollout -> queue     the sampled tokens, each with its log-prob and weight version
    Failure     rollout -> queue     a ticket that failed, and the reason
    Batch       queue   -> learner   the fixed number of trajectories of one update
    Push        learner -> weights   a version's tensors, their hashes, and the layout of its buckets
    *Report     every stage -> run   numbers for display

Arrays travel as bytes columns (little-endian int32 / float32 / uint8), read with `ints`, `floats`, `flags`:
a thousand tokens cost less than a microsecond to encode, against tens for a list.
"""

import hashlib
from typing import Any, Literal

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


class Message(WireStruct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """One turn of a chat. `role` is system, user, assistant or tool.

    The chat template gets every field that is set. `content` is None if an assistant only calls tools. A tool's message
    answers the call with the id `tool_call_id`. `fields` has all other fields, `reasoning_content` for example.
    """

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    fields: dict[str, Any] = {}

    def __hash__(self) -> int:
        """A hash of role and content only: dicts have none."""
        return hash((self.role, self.content))

    @property
    def text(self) -> str:
        """The content; empty if it is None."""
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """The message as a dict of its set fields, the form of chat templates and TRL's rewards."""
        known = {"name": self.name, "tool_calls": list(self.tool_calls), "tool_call_id": self.tool_call_id}
        filled = {key: value for key, value in known.items() if value}
        return {"role": self.role, "content": self.content, **self.fields, **filled}


class Template(WireStruct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """Inputs of a chat template besides the messages: its `arguments` by name, and the JSON schemas of `tools`.

    `control_tokens` decides how the name of a control token in a message or text is read: "text" reads it as plain
    text, "parse" as the token.
    """

    arguments: dict[str, Any] = {}
    tools: tuple[dict[str, Any], ...] = ()
    control_tokens: Literal["text", "parse"] = "text"

    def __hash__(self) -> int:
        """A hash of `control_tokens` only: dicts have none."""
        return hash(self.control_tokens)


class Prompt(WireStruct, frozen=True):
    """One instance of a task: `messages` for the chat template, or else `text`.

    `columns` is its data row, passed to rewards by name; `source` is its data set. Only its last `max_tokens` tokens
    are used.
    """

    text: str
    columns: dict[str, Any]
    messages: tuple[Message, ...] = ()
    source: str = ""
    max_tokens: int | None = None
    template: Template = Template()


class ScoredText(WireStruct, frozen=True):
    """A trajectory as input of a reward. `finish` is "length" if the completion was truncated.

    `num_tokens` is the number of sampled tokens, `tokens` their ids (int32). With several turns, `turns` has the
    policy's text of each turn, and `completion` all of them with the observations in between. `messages` are those of a
    chat prompt; `observations` are the environment's messages after each turn but the last.
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
        """The prompt's messages without a final assistant message, which the completion continues."""
        return self.messages[:-1] if self._prefill else self.messages

    @property
    def completion_messages(self) -> tuple[Message, ...]:
        """The messages after the prompt: the policy's turns and the observations; empty if the prompt is not a chat."""
        if not self.messages:
            return ()
        first, *rest = self.turns or (self.completion,)
        turns = [Message(role="assistant", content=text) for text in (self._prefill + first, *rest)]
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
        """The ids of the sampled tokens."""
        return ints(self.tokens).tolist()


class Reward(WireStruct, frozen=True):
    """A structured reward in place of a number. The trajectory's reward is `total`, the sum of all its parts.

    `score` is placed on the last token, `turns[k]` on the last token of turn k, `tokens[t]` on the t-th sampled token.
    `components` are logged as reward_NAME, and compared by `gdpo` and `resample`. `explanation` is a text for display.
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


class Identity(WireStruct, frozen=True, order=True):
    """The stable name of one trajectory; a trajectory is consumed at most once under its identity.

    `prompt` is the index in the task's endless, seeded stream of prompts: configuration and identity determine the
    prompt. `segment` numbers the segments of an attempt; 0 without segments.
    """

    task: str
    prompt: int
    sample: int
    attempt: int = 0
    segment: int = 0


class Ticket(WireStruct, frozen=True):
    """Permission to sample one trajectory. `slot` is the number of its slot; smaller numbers are older."""

    identity: Identity
    slot: int


class Trajectory(WireStruct, frozen=True, omit_defaults=True):
    """One finished, scored completion, or a segment of one.

    All columns but `prompt_tokens`, `candidates`, `routes`, `branches` and `turns` have T entries, T >= 1.

    `mask` is true for tokens that the policy sampled; only these are trained on. `logprobs` are under the sampling
    distribution. `versions` are the weight versions that sampled each token; without `versions_known` the engine did
    not report them, and they are the oldest possible versions. `reward` is the sum of `token_rewards`; if these are
    empty, the whole reward is on the last sampled token.

    With top-p or top-k, `candidates` are the tokens that could have been sampled: those of token 0 in ascending order,
    then those of token 1, and so on. `candidate_counts` has their number for each token; 0 means the whole vocabulary.
    Without top-p and top-k both are empty.

    `teacher_logprobs` are those of a teacher that is a server, 0 for tokens that were not sampled; empty without one.
    `routes` (or empty) are the experts to which the engine routed each token of prompt and completion but the last,
    layer by layer, in numbers of `route_bytes` (types/routes.py). `explanation` is the beginning of the reward's
    explanation.

    `branches` make the row (prompt and completion) a tree (types/branches.py): int32 pairs (start, parent). Token
    `start` of the row, which was not sampled, follows token `parent`, or no token (-1). Without branches each token
    follows the one before it. Tokens are in order of time. `turns` are the turns of an agent's run, also those
    that were not delivered (types/turns.py). `source` is the prompt's, where a task has several.

    A segment that is followed by others has `finish` "cut" and no reward; the last segment has the reward of the whole.
    The last `prefix` of its `prompt_tokens` are the tokens of earlier segments.
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
    versions_known: bool = True
    source: str = ""

    @property
    def num_tokens(self) -> int:
        """T, the length of the completion."""
        return len(self.tokens) // 4

    @property
    def num_sampled(self) -> int:
        """The number of tokens that the policy sampled, without an environment's observations."""
        return len(self.mask) - self.mask.count(0)

    @property
    def oldest_version(self) -> int:
        """The oldest version that sampled a token."""
        return int(ints(self.versions)[flags(self.mask)].min())


class Failure(WireStruct, frozen=True):
    """A failed ticket: its stage, the reason, and the number of tokens in completions that were finished.

    `version` is the engine's at the start, -1 if unknown; `source` is as in `Trajectory`.
    """

    identity: Identity
    actor: str
    stage: Literal["engine", "environment", "reward", "teacher", "task"]
    reason: str
    tokens: int = 0
    version: int = -1
    source: str = ""


class Batch(WireStruct, frozen=True):
    """The trajectories of the update from `version` to `version + 1`, in order.

    Tokens sampled by a version below `min_version` are older than `max_lag` allows: they count in the denominators but
    not in the loss (`too_old = mask`; with the other choices a batch has none). A part of a batch has the indices of
    its `rows` (int32) in the whole batch; for a whole batch `rows` is empty.
    """

    version: int
    min_version: int
    rows: bytes = b""
    trajectories: tuple[Trajectory, ...] = ()


class Outline(WireStruct, frozen=True):
    """A batch without token ids; `prompt_lengths` [B] (int32) are the numbers of prompt tokens."""

    batch: Batch
    prompt_lengths: bytes


class Tokens(WireStruct, frozen=True):
    """The token ids and routes of one trajectory, in its own columns; `row` is its index in the batch."""

    row: int
    prompt_tokens: bytes
    tokens: bytes
    candidates: bytes
    routes: bytes = b""
    route_bytes: int = 2


class Tensor(WireStruct, frozen=True):
    """One parameter. `content` is the hash of its bytes, or of a rank's shard of them (weights/content.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: int


class TensorChunk(WireStruct, frozen=True):
    """Bytes `first : first + nbytes` of a tensor, whole or as a delta: `start : start + stored` of a bucket."""

    tensor: int
    first: int
    nbytes: int
    bucket: int
    start: int
    stored: int
    is_delta: bool = False


class Push(WireStruct, frozen=True):
    """One version for the engines, or one rank's share of it; its deltas are relative to `base_version`.

    `frozen` tensors are not sent: engines have them. `admitted_lag` is set if the lag is adaptive.
    """

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
        """The SHA-256 of a version's names, dtypes, shapes and content hashes; the same for any sharding."""
        described = [(tensor.name, tensor.dtype, tensor.shape, tensor.content) for tensor in self.tensors + self.frozen]
        return hashlib.sha256(repr(described).encode()).hexdigest()


class TokenRecord(WireStruct, frozen=True):
    """The learner's numbers for each completion token of a batch, as of the update's start: float32 without padding.

    `values` are the critic's, `proximal_logprobs` the learner's, if a pass before the first step computed them,
    `advantages` those of the loss, whitened if configured. A column that was not computed is empty.
    """

    values: bytes = b""
    proximal_logprobs: bytes = b""
    advantages: bytes = b""
