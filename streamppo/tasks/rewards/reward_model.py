"""A reward model: a sequence classification model in its own Ray actor, shared by all rollout actors.

A Ray actor ends with the process that created it. Rollout actors may be replaced, so the driver creates the reward
model's actor. If this actor dies, Ray restarts it; until then every call is a retryable failure.

A conversation is rendered by the reward model's chat template. A plain text is prompt plus completion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import ray

from streamppo.config.reward import ModelScorer, Reward
from streamppo.errors import Retryable, TaskError
from streamppo.tasks.chat_template import PLAIN, ChatTemplate, sources
from streamppo.tasks.control_tokens import MARK, ControlTokens
from streamppo.tasks.rewards.batcher import CallBatch
from streamppo.tasks.rewards.outcome import Outcome, check, failure_of
from streamppo.tasks.rewards.signature import Columns, Texts
from streamppo.types import ScoredText, decode, encode

if TYPE_CHECKING:
    from ray.actor import ActorProxy


class RewardModel:
    """Scores texts with a model, one batch at a time."""

    def __init__(
        self, path: str, label: int, max_tokens: int, dtype: str, *, threads: int = 1, gpus: float = 0
    ) -> None:
        import torch

        from streamppo.weights.models import loading, tokenizer

        torch.set_num_threads(threads)
        self._device = "cuda" if gpus else "cpu"
        self._label = label
        self._max_tokens = max_tokens
        self._tokenizer: Any = tokenizer.load(path)
        backend = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        self._control = ControlTokens(self._tokenizer, backend, sources(self._tokenizer))
        self._chat = ChatTemplate(self._tokenizer, self._control, "")
        model = loading.load(path, "AutoModelForSequenceClassification", dtype=getattr(torch, dtype)).model
        if label >= model.config.num_labels:
            raise TaskError(f"{path} has {model.config.num_labels} outputs: there is no output {label}")
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # A decoder with a classification head finds the last token before the padding by this id.
        model.config.pad_token_id = self._tokenizer.pad_token_id
        self._model = model.to(self._device).eval()

    @ray.method(max_task_retries=-1)
    def ready(self) -> bool:
        """Return True once the model has loaded. A call during a restart waits for the restarted actor."""
        return True

    @ray.method
    def score(self, texts: bytes) -> bytes:
        """Return one outcome for each text. A too long text fails without affecting the others."""
        scored_texts = decode(texts, tuple[ScoredText, ...])
        ids = [self._ids(text) for text in scored_texts]
        fitting = [number for number, row in enumerate(ids) if len(row) <= self._max_tokens]
        outcomes = [
            Outcome(reason=f"{len(row)} tokens are more than the reward model's max_tokens ({self._max_tokens})")
            for row in ids
        ]
        for number, score in zip(fitting, self._forward([ids[number] for number in fitting]), strict=True):
            outcomes[number] = check(score, scored_texts[number])
        return encode(tuple(outcomes))

    def _ids(self, text: ScoredText) -> list[int]:
        """Return the tokens of prompt and completion. As in a prompt, the name of a control token stays text."""
        if not text.messages:
            return self._tokenizer(text.prompt + text.completion, split_special_tokens=True)["input_ids"]
        if not self._tokenizer.chat_template:
            raise TaskError("the reward model's tokenizer has no chat template, which messages need: use plain texts")
        rendered = self._chat.render_conversation((*text.prompt_messages, *text.completion_messages), PLAIN)
        if MARK in rendered:
            return self._control.ids(rendered)
        return self._tokenizer(rendered, add_special_tokens=False)["input_ids"]

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        if not rows:
            return []
        batch = self._tokenizer.pad({"input_ids": rows}, padding_side="right", return_tensors="pt").to(self._device)
        with torch.inference_mode():
            logits = self._model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, self._label].float().tolist()


Models: TypeAlias = "Mapping[str, ActorProxy[RewardModel]]"


def create(reward: Reward, options: Callable[[str], Mapping[str, object]]) -> Models:
    """Start the actor of every reward model, with Ray options `options(name)`. The actors end with this process."""
    return {
        name: ray.remote(RewardModel)
        .options(name=f"reward-{name}", max_restarts=-1, **options(name))
        .remote(config.path, config.label, config.max_tokens, config.dtype, threads=config.threads, gpus=config.gpus)
        for name, config in reward.models().items()
    }


async def connect(actor: ActorProxy[RewardModel], config: ModelScorer) -> CallBatch:
    """Wait until a reward model has loaded, and return its call. Raises `TaskError` if the model cannot load."""
    from ray.exceptions import RayError, RayTaskError

    try:
        await actor.ready.remote()
    except RayError as error:
        # The last line of a traceback is its error.
        why = str(error).strip().splitlines()[-1]
        raise TaskError(f"the reward model {config.path} cannot be loaded: {why}") from error

    async def call(texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
        try:
            return decode(await actor.score.remote(encode(texts)), tuple[Outcome, ...])
        except RayTaskError as error:
            return (failure_of(error.cause),) * len(texts)
        except RayError as error:
            return (failure_of(Retryable(f"the reward model {config.path} is not available: {error}")),) * len(texts)

    return call
