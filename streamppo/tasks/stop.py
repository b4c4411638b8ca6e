"""The end of a completion: stop tokens of model, tokenizer and chat template, rollout.stop, and the length limit.

    generation_config.json  eos_token_id        [151645, 151643]    in any form: a number, a token's name, a list
    config.json             eos_token_id        151643              also of its text_config, if it has one
    tokenizer               eos_token           <|im_end|>
    chat template           "...!<|im_end|>\\n"  the token after an assistant's message (`end_of_turn`)
    rollout.stop            "</s>", "\\n\\nQ:"    the name of an added token, or a string

A completion ends with the first stop token, or with the token that completes a stop string. Without a stop a completion
ends at its length limit: rollout.max_tokens, or less by a user's function:

    def limit(prompt: Prompt, identity: Identity | None) -> int      None for an evaluation's greedy answer

The function is called in the rollout actor's event loop, once for each trajectory, so it must be fast. The function
may return a random limit. If the random limit is seeded by `identity`, a retried trajectory gets the same limit.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, TypeAlias, cast

from streamppo.errors import ModelError, TaskError
from streamppo.tasks import plugins
from streamppo.tasks.chat_forms import parts
from streamppo.tasks.chat_template import FAULTS
from streamppo.types import Identity, Ints, Prompt
from streamppo.weights.models import generation
from streamppo.weights.models.settings import REFUSALS

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

SENTINEL = "\N{WHITE STAR}streamppo\N{BLACK STAR}"
"""The assistant's text in a test conversation; no template contains it."""
QUESTION = "\N{WHITE STAR}question\N{BLACK STAR}"
"""The user's text in a test conversation."""
SLACK = 4
"""A stop string of n bytes is searched in the last n + `SLACK` tokens; the first token may be part of a character."""

log = logging.getLogger(__name__)


FILES = ("generation config", "model config", "text config")
"""The names of a model's files in `Stop.origins`."""


class Stop(NamedTuple):
    """The stop tokens of a completion, each with the sources that name it, and the stop strings.

    `closing` is the text that the chat template writes between an assistant's words and the end of the turn.
    """

    origins: Mapping[int, Sequence[str]] = {}
    strings: Sequence[str] = ()
    closing: str = ""

    @property
    def ids(self) -> frozenset[int]:
        return frozenset(self.origins)

    def text(self, tokens: Ints, finish: str, decode: Callable[[Ints], str]) -> str:
        """Return the text of a turn as rewards get it: without the stop token, or up to the stop string.

        Example: "46<|END_RESPONSE|><|END_OF_TURN|>" gives "46" if `closing` is "<|END_RESPONSE|>".
        """
        if finish == "stop" and int(tokens[-1]) in self.origins:
            return decode(tokens[:-1]).removesuffix(self.closing)
        text = decode(tokens)
        if finish != "stop" or not self.strings:
            return text
        return text[: min(at if (at := text.find(string)) >= 0 else len(text) for string in self.strings)]

    def make_check(self, decode: Callable[[Sequence[int]], str]) -> Callable[[Ints], bool] | None:
        """Return a test of tokens [T]: True if the last token completes a stop string. None if there are no strings."""
        if not self.strings:
            return None
        # A token has at least one byte, so `window` tokens contain every stop string.
        window = max(len(string.encode(errors="surrogatepass")) for string in self.strings) + SLACK

        def completes(tokens: Ints) -> bool:
            text = decode(tokens[-window:].tolist())
            return any(string in text for string in self.strings)

        return completes

    def describe(self, names: Callable[[int], str]) -> str:
        """List each token with its id and its sources, and each string."""
        tokens = [f"{names(stop)} ({stop}: {', '.join(self.origins[stop])})" for stop in sorted(self.origins)]
        return ", ".join([*tokens, *(f"the string {stop!r}" for stop in self.strings)])


def read(
    model: str | Path,
    hf_config: "PreTrainedConfig",
    tokenizer: "PreTrainedTokenizerFast | None",
    configured: Sequence[str] = (),
) -> Stop:
    """Find all stops of a model; `configured` is rollout.stop. Raises `ModelError` for an invalid eos_token_id."""
    origins: dict[int, list[str]] = {}
    added = {} if tokenizer is None else tokenizer.get_added_vocab()
    names = {} if tokenizer is None else {**tokenizer.get_vocab(), **added}
    for place, value in _eos(model, hf_config, tokenizer):
        for token in _ids(value, place, names):
            origins.setdefault(token, []).append(place)
    ending = None if tokenizer is None else _ending(tokenizer)
    if ending is not None:
        origins.setdefault(ending.token, []).append("chat template")
    for name in configured:
        if name in added:
            origins.setdefault(added[name], []).append("rollout.stop")
    strings = tuple(name for name in configured if name not in added)
    return Stop(origins, strings, ending.closing if ending is not None and ending.closing.strip() else "")


def end_of_turn(tokenizer: "PreTrainedTokenizerFast") -> int | None:
    """Return the token that the chat template writes after an assistant's message; None if it writes none.

    The template may write several tokens, and others if a message follows. The tokens common to both cases count; if
    there are none, those at the end of a conversation; if there are none, those before the opening of a user's message:

        at the end of a conversation              if a message follows               end of the turn
        <|im_end|>                                <|im_end|><|im_start|>             <|im_end|>
        <|END_RESPONSE|><|END_OF_TURN|>           <|END_RESPONSE|><|END_OF_TURN|>    the tokenizer's eos_token
        <|close|>a<|close|>b<|end_of_msg|>        the same, and <|open|>             <|end_of_msg|>: it occurs once
        <|return|>                                <|end|><|start|>                   <|return|>
                                                  <|assistant_end|><|user_start|>    <|assistant_end|>
                                                  <|user|>                           none
    """
    ending = _ending(tokenizer)
    return None if ending is None else ending.token


class _Ending(NamedTuple):
    """The token at the end of an assistant's turn, and the text between the assistant's words and this token."""

    token: int
    closing: str


def _ending(tokenizer: "PreTrainedTokenizerFast") -> _Ending | None:
    if not getattr(tokenizer, "chat_template", None):
        return None
    user: dict[str, object] = {"role": "user", "content": QUESTION}
    turn = [user, {"role": "assistant", "content": SENTINEL}]
    last, followed, opening = _suffixes(tokenizer, [*turn, user])
    # The longer of two names at the same position counts. Added tokens that are only white space do not end a turn.
    named = {name: token for name, token in tokenizer.get_added_vocab().items() if name.strip(" \n\t\u2581")}
    pattern = re.compile("|".join(map(re.escape, sorted(named, key=len, reverse=True))) or "(?!)")
    before_opening = followed[: len(followed) - len(_common_start(followed[::-1], opening[::-1]))]
    for text in (_common_start(last, followed), last, before_opening):
        if names := pattern.findall(text):
            once = [name for name in names if names.count(name) == 1]
            name = next((name for name in names if name == tokenizer.eos_token), (once or names)[0])
            return _Ending(named[name], text.partition(name)[0])
    return None


def _common_start(first: str, second: str) -> str:
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))
    return "".join(character for character, _ in pairs)


def _suffixes(tokenizer: "PreTrainedTokenizerFast", conversation: Sequence[dict[str, object]]) -> tuple[str, str, str]:
    """Return the texts after the assistant's words, at the end and up to the next question, and before a question.

    All are "" if the chat template leaves out the assistant's words.
    """
    for written in (conversation, [{**message, "content": parts(message["content"])} for message in conversation]):
        before, sentinel, last = _render(tokenizer, written[:2]).rpartition(SENTINEL)
        if sentinel:
            followed = _render(tokenizer, written).rpartition(SENTINEL)[2]
            return last, followed.partition(QUESTION)[0], before.partition(QUESTION)[0]
    return "", "", ""


def _render(tokenizer: "PreTrainedTokenizerFast", conversation: Sequence[dict[str, object]]) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                cast("list[dict[str, str]]", conversation), add_generation_prompt=False, tokenize=False
            )
        )
    except FAULTS as error:
        # The template may still render the task's prompts.
        log.debug("the chat template writes no plain turn: %s", error)
        return ""


def _eos(
    model: str | Path, hf_config: "PreTrainedConfig", tokenizer: "PreTrainedTokenizerFast | None"
) -> list[tuple[str, object]]:
    from transformers import GenerationConfig

    text_config = hf_config.get_text_config()
    sources: list[tuple[str, object]] = [("model config", getattr(hf_config, "eos_token_id", None))]
    if text_config is not hf_config:
        sources.append(("text config", getattr(text_config, "eos_token_id", None)))
    if tokenizer is not None:
        sources.append(("tokenizer", tokenizer.eos_token_id))
    try:
        settings = GenerationConfig.from_pretrained(model)
    except OSError:
        # A model may lack generation_config.json.
        return sources
    except REFUSALS:
        # The installed transformers refuses one of the settings; the others are still read.
        settings = generation.read_settings(model).config
    return [("generation config", settings.eos_token_id), *sources]


def _ids(value: object, place: str, names: Mapping[str, int]) -> list[int]:
    """Return the tokens in a value of eos_token_id, which published models write in many forms; -1 means no token."""
    match value:
        case None:
            return []
        case bool():
            pass
        case int():
            return [value] if value >= 0 else []
        case str() if value in names:
            return [names[value]]
        case str() if value.strip().lstrip("-").isdigit():
            return _ids(int(value), place, names)
        case list() | tuple() | set():
            return [token for item in value for token in _ids(item, place, names)]
        case _:
            pass
    raise ModelError(
        f"the {place}'s eos_token_id has {value!r}, which is not a token: write a token's number, or a list of numbers"
    )


LengthLimit: TypeAlias = Callable[[Prompt, Identity | None], int]


def load_limit(name: str, max_tokens: int) -> LengthLimit:
    """Load the function `name`, and cap its limits at `max_tokens`. If `name` is empty, every limit is `max_tokens`.

    Raises `TaskError` if the function cannot be loaded. The returned function raises `TaskError` if the user's function
    raises, or returns anything except an integer above 0.
    """
    if not name:
        return lambda prompt, identity: max_tokens
    # `index` below rejects an answer that is not an integer.
    user_limit = cast(Callable[[Prompt, Identity | None], SupportsIndex], plugins.function(name, "rollout.limit"))

    def limit(prompt: Prompt, identity: Identity | None) -> int:
        tokens = plugins.call(f"rollout.limit {name!r}", lambda: index(user_limit(prompt, identity)))
        if tokens < 1:
            raise TaskError(f"rollout.limit {name!r} gave {tokens}, and a completion has at least 1 token")
        return min(tokens, max_tokens)

    return limit
