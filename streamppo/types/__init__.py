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
from typing import Any, Literal

from streamppo.types.crossing import Flags as Flags
from streamppo.types.crossing import Floats as Floats
from streamppo.types.crossing import Ints as Ints
from streamppo.types.crossing import Routes as Routes
from streamppo.types.crossing import WireStruct
from streamppo.types.crossing import decode as decode
from streamppo.types.crossing import encode as encode
from streamppo.types.crossing import flags as flags
from streamppo.types.crossing import floats as floats
from streamppo.types.crossing import ints as ints
from streamppo.types.crossing import routes as routes
from streamppo.types.crossing import utf8_safe as utf8_safe
from streamppo.types.reports import EngineReport as EngineReport
from streamppo.types.reports import EvaluationReport as EvaluationReport
from streamppo.types.reports import QueueReport as QueueReport
from streamppo.types.reports import Sample as Sample
from streamppo.types.reports import ScorerReport as ScorerReport
from streamppo.types.reports import UpdateReport as UpdateReport


class Message(WireStruct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """One turn of a chat. `role` is system, user, assistant or tool.

    The chat template gets every field that is there. `content` is None where an assistant only calls tools; the call
    with the id `tool_call_id` is the one that a tool answers. `fields` are those of other names, `reasoning_content`
    for example.
    """

    role: str
    content: str | None
    name: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    tool_call_id: str | None = None
    fields: dict[str, Any] = {}

    def __hash__(self) -> int:
        """A hash of what is always there: dicts have none."""
        return hash((self.role, self.content))

    @property
    def text(self) -> str:
        """The content, empty where there is none."""
        return self.content or ""

    def plain(self) -> dict[str, Any]:
        """The message as chat templates and TRL's rewards read it: a dict of the fields that it has."""
        known = {"name": self.name, "tool_calls": list(self.tool_calls), "tool_call_id": self.tool_call_id}
        given = {key: value for key, value in known.items() if value}
        return {"role": self.role, "content": self.content, **self.fields, **given}


class Template(WireStruct, frozen=True, omit_defaults=True, repr_omit_defaults=True):
    """Inputs of a chat template besides the messages: its `arguments` by name, and the JSON schemas of `tools`.

    With `control_tokens` "text" a control token's name in a message or a text is text; with "parse" it is the token.
    """

    arguments: dict[str, Any] = {}
    tools: tuple[dict[str, Any], ...] = ()
    control_tokens: Literal["text", "parse"] = "text"

    def __hash__(self) -> int:
        """A hash of what is always there, as that of `Message`."""
        return hash(self.control_tokens)


class Prompt(WireStruct, frozen=True):
    """One instance of a task: `messages` for the chat template, or else `text`.

    `columns` is its data row, handed to rewards by name; `source` is the data set that it comes from. Of its tokens
    the last `max_tokens` are used.
    """

    text: str
    columns: dict[str, Any]
    messages: tuple[Message, ...] = ()
    source: str = ""
    max_tokens: int | None = None
    template: Template = Template()


class ScoredText(WireStruct, frozen=True):
    """A trajectory as a reward sees it. `finish` is "length" when the completion was cut off.

    `num_tokens` is the number of tokens that the policy sampled, `tokens` their ids (int32). Of several turns, `turns`
    holds the policy's text of each, and `completion` all of it with the observations in between. `messages` are the
    prompt's, if it is a chat; `observations` are the environment's messages after each turn but the last.
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
        """The prompt's messages without an assistant's at the end: the completion continues that one."""
        return self.messages[:-1] if self._prefill else self.messages

    @property
    def completion_messages(self) -> tuple[Message, ...]:
        """The messages behind those of the prompt: the policy's turns and the observations; none if it is no chat."""
        if not self.messages:
            return ()
        first, *rest = self.turns or (self.completion,)
        turns = [Message(role="assistant", content=text) for text in (self._prefill + first, *rest)]
        # A trajectory that was cut off may end with an observation.
        between = (*self.observations, *[()] * (len(turns) - len(self.observations)))
        return tuple(one for turn, said in zip(turns, between, strict=True) for one in (turn, *said))

    @property
    def _prefill(self) -> str:
        return self.messages[-1].text if self.messages and self.messages[-1].role == "assistant" else ""

    @property
    def token_ids(self) -> list[int]:
        """The ids of the tokens that the policy sampled."""
        return ints(self.tokens).tolist()


class Reward(WireStruct, frozen=True):
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


class Identity(WireStruct, frozen=True, order=True):
    """The stable name of one trajectory; consumed at most once under it.

    `prompt` is the position in the task's endless, seeded stream of prompts, so that the configuration and the
    identity alone are enough to rebuild the prompt. `segment` counts the segments of an attempt; without any it is 0.
    """

    task: str
    prompt: int
    sample: int
    attempt: int = 0
    segment: int = 0


class Ticket(WireStruct, frozen=True):
    """Leave to sample one trajectory. `slot` is its age: the order in which the queue issued it."""

    identity: Identity
    slot: int


class Trajectory(WireStruct, frozen=True, omit_defaults=True):
    """One finished, scored completion, or a segment of one.

    All columns but `prompt_tokens`, `candidates`, `routes`, `branches` and `turns` have T entries, T >= 1.

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

    `branches` make a tree of the row, its prompt and completion (types/branches.py): int32 pairs (start, parent). The
    row's token `start` follows its token `parent`, or nothing (-1), in place of the token before it. It was not
    sampled. Without branches each token follows the one before it. The order of tokens is that of time. Of an agent's
    run `turns` are the places of its turns, those that nobody received included (types/turns.py).

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
    branches: bytes = b""
    turns: bytes = b""
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


class Failure(WireStruct, frozen=True):
    """A ticket that came to nothing: where, why, and the tokens of completions that did come to their end."""

    identity: Identity
    actor: str
    stage: Literal["engine", "environment", "reward", "teacher", "task"]
    reason: str
    tokens: int = 0


class Batch(WireStruct, frozen=True):
    """The trajectories that the update from `version` to `version + 1` trains on, in this order.

    Tokens sampled by a version below `min_version` are older than `max_lag` allows: they count in the
    denominators and stay out of the loss (`too_old = mask`; the other choices leave none in the batch). A part of a
    batch has the numbers of its `rows` (int32); a whole one has none.
    """

    version: int
    min_version: int
    rows: bytes = b""
    trajectories: tuple[Trajectory, ...] = ()


class Outline(WireStruct, frozen=True):
    """A batch whose trajectories have no token ids; `prompt_lengths` [B] say how many tokens their prompts have."""

    batch: Batch
    prompt_lengths: bytes


class Tokens(WireStruct, frozen=True):
    """The token ids and routes of one trajectory, as it has them; `row` is its place in the batch."""

    row: int
    prompt_tokens: bytes
    tokens: bytes
    candidates: bytes
    routes: bytes = b""


class Tensor(WireStruct, frozen=True):
    """One parameter. `content` is the hash of its bytes, or of a rank's share of them (weights/content.py)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    content: int


class TensorChunk(WireStruct, frozen=True):
    """Bytes `first : first + nbytes` of a tensor, or their changes: `start : start + stored` of a bucket."""

    tensor: int
    first: int
    nbytes: int
    bucket: int
    start: int
    stored: int
    is_delta: bool = False


class Push(WireStruct, frozen=True):
    """One version on its way to the engines, or one rank's share of it; deltas in it are to `base_version`.

    Tensors that are `frozen` do not travel: engines have them. `admitted_lag` comes with a lag that is steered.
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
        """One hash (SHA-256) for a whole version: that of names, types, shapes and contents, however it was cut."""
        told = [(one.name, one.dtype, one.shape, one.content) for one in self.tensors + self.frozen]
        return hashlib.sha256(repr(told).encode()).hexdigest()


class TokenRecord(WireStruct, frozen=True):
    """The learner's numbers of each token of a batch, as the update begins: float32 without padding, or empty.

    `values` are the critic's; `proximal_logprobs` are under the learner's own policy, where a pass before the first
    step gives them; `advantages` are those of the loss, whitened if it wants them so.
    """

    values: bytes = b""
    proximal_logprobs: bytes = b""
    advantages: bytes = b""
