"""Converts texts to token ids and back by the model's tokenizer; makes the character tokenizer of builtin:tiny."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from streamppo import durable
from streamppo.errors import TaskError
from streamppo.tasks import chat_template, stop
from streamppo.tasks.chat_template import PLAIN, AfterTurn, Calls, ChatTemplate
from streamppo.tasks.control_tokens import MARK, ControlTokens
from streamppo.tasks.dataset_files import QUOTED
from streamppo.types import Flags, Ints, Message, Prompt, Template, encode
from streamppo.weights.models import tokenizer as tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

EnvironmentText: TypeAlias = str | tuple[Message, ...]
"""An environment's answer: messages for the chat template, or a plain text."""
PADDING, END = 0, 1
"""Token ids of the character tokenizer."""
SPECIALS = 3
"""Number of special tokens of the character tokenizer: padding, end and unknown. The first ids are theirs."""

CACHED_PROMPTS = 256
"""Number of prompts whose token ids are cached."""
PROBE = "a"
"""A text that shows which tokens the tokenizer adds around a text."""
UNKNOWN = -1
"""Value of `_turn_end` until the token at a turn's end has been found."""
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Names of the special tokens that are left out of a completion's text."""


class Tokenizer:
    """The tokenizer of a model folder or hub name. The time in chat templates is `clock` (ISO 8601), or now for ""."""

    def __init__(self, path: str | Path, clock: str = "") -> None:
        try:
            self._tokenizer: Any = tokenizers.read(path)
        except ValueError as error:
            raise TaskError(f"the tokenizer of {str(path)!r} cannot be loaded: {error}") from error
        self._fast = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        if self._fast is not None:
            # The tokenizer's file may enable truncation and padding, which transformers disables in each call.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._plain = _decodes_plainly(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        self.vocabulary = len(self._tokenizer)
        # If the files are missing, transformers makes a tokenizer with only special tokens.
        if self.vocabulary <= len(self._tokenizer.all_special_ids):
            raise TaskError(f"{path}: there is no tokenizer")
        self._control = ControlTokens(self._tokenizer, self._fast, chat_template.sources(self._tokenizer))
        self.chat = ChatTemplate(self._tokenizer, self._control, clock)
        self._bos: str = self._tokenizer.bos_token or ""
        self._hidden_ids = {getattr(self._tokenizer, f"{name}_token_id") for name in NAMED}
        self._hides_all_special = self._control.special <= self._hidden_ids
        self._leading_ids = self._find_leading_ids()
        self._turn_end: int | None = UNKNOWN
        self._encoded: dict[tuple[str | bytes, int | None], Ints] = {}

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def response_parser(
        self, context: Sequence[int] = (), tools: Sequence[dict[str, Any]] = ()
    ) -> Callable[[str], object] | None:
        """Return a parser for a turn's text after `context`; None if the tokenizer does not describe the form of turns.

        The description is a `response_template`, or in older versions of transformers a `response_schema`. With a
        template of newer versions, the arguments of calls get the types that `tools` declare.
        """
        if (template := getattr(self._tokenizer, "response_template", None)) is not None:
            parse = self._tokenizer.parse_response
            typed = {"tools": list(tools) or None} if "tools" in inspect.signature(parse).parameters else {}
            return lambda text: parse(text, template, prefix=self.spell(context), **typed)
        schema = getattr(self._tokenizer, "response_schema", None)
        return None if schema is None else lambda text: self._tokenizer.parse_response(text, schema)

    def numbers(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def texts(self, tokens: Sequence[int]) -> list[str]:
        return [self.spell([token]) for token in tokens]

    def name(self, token: int) -> str:
        """Return the text of one token, or "no token" for an unknown id."""
        return self._tokenizer.convert_ids_to_tokens(token) or "no token"

    def unknown_ids(self, vocabulary: int) -> tuple[int, ...]:
        """Return the ids below `vocabulary` without a token: models may have more embedding rows than tokens."""
        return tuple(sorted(set(range(vocabulary)).difference(self.numbers().values())))

    def tokens_beyond(self, vocabulary: int) -> tuple[str, ...]:
        """Return the names of the tokens whose ids are at least `vocabulary`, a model's number of embedding rows."""
        return tuple(name for name, token in self.numbers().items() if token >= vocabulary)

    def is_spare(self, name: str) -> bool:
        """Return True for a special token that neither templates nor the post-processor write, for example padding."""
        token = self._tokenizer.convert_tokens_to_ids(name)
        is_written = any(name in text for text in chat_template.sources(self._tokenizer))
        return token in self._control.special and token not in (self.eos_id, *self._leading_ids) and not is_written

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special tokens included."""
        if self._fast is not None and self._plain:
            return self._fast.decode(tokens, skip_special_tokens=False)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def spread(self, count: int) -> list[int]:
        """Return at most `count` token ids in rising order, spread evenly over all tokens."""
        known = sorted(set(self.numbers().values()))
        ids = [known[n * (len(known) - 1) // max(1, count - 1)] for n in range(count)]
        return list(dict.fromkeys(ids))

    def render(self, prompt: Prompt) -> str:
        """Return the text of a prompt: its messages in the chat template with the opening of the answer, or its text.

        A last message of the assistant is left open to be continued. Raises `TaskError` for messages if the tokenizer
        has no template, or if the template rejects them.
        """
        if not prompt.messages:
            return prompt.text
        return self._control.restore(self.chat.render(prompt.messages, prompt.template))

    def find_control_token(self, prompt: Prompt) -> str | None:
        """Return the first special token whose name is in a prompt's text, if there is one."""
        texts = [message.text for message in prompt.messages] or [prompt.text.removeprefix(self._bos)]
        return next((name for text in texts if (name := self._control.find(text))), None)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return all token ids of a prompt. Raises `TaskError` if there are none.

        A template writes its special tokens itself. A plain text gets the tokenizer's leading special tokens once, but
        no trailing ones, because the policy continues the text.
        """
        if prompt.messages:
            ids = self._rendered_ids(self.chat.render(prompt.messages, prompt.template))
        else:
            ids = self._prompt_text_ids(prompt.text, prompt.template)
        if not ids:
            raise TaskError(f"the prompt {prompt.text!r:.{QUOTED}} has no tokens")
        return ids

    def encode(self, prompt: Prompt) -> Ints:
        """Return the last `max_tokens` token ids [P] of a prompt; read-only, because its samples share the array."""
        is_plain = not prompt.messages and prompt.template.control_tokens == "text"
        key = prompt.text if is_plain else encode((prompt.text, prompt.messages, prompt.template))
        cached = self._encoded.get((key, prompt.max_tokens))
        if cached is not None:
            return cached
        ids = self.ids(prompt)
        tokens = np.asarray(ids if prompt.max_tokens is None else ids[-prompt.max_tokens :], dtype=np.int32)
        tokens.flags.writeable = False
        if len(self._encoded) >= CACHED_PROMPTS:
            del self._encoded[next(iter(self._encoded))]
        self._encoded[key, prompt.max_tokens] = tokens
        return tokens

    def turn_end(self) -> int | None:
        """Return the token that the chat template writes after an assistant's turn, such as `<|im_end|>`, or None."""
        if self._turn_end is UNKNOWN:
            self._turn_end = stop.end_of_turn(self._tokenizer)
        return self._turn_end

    def observation(
        self,
        said: EnvironmentText,
        template: Template = PLAIN,
        last: int | None = None,
        calls: Calls = (),
        before: Sequence[Message] = (),
    ) -> Ints:
        """Return the token ids [O] of an environment's words after a turn, with the opening of the next turn.

        A conversation is rendered with a placeholder for the policy's words, and only the text after the placeholder is
        tokenised. `calls` are the calls at the end of the turn, and `before` the messages before it, if known. The end
        of the turn is included only if `last`, the turn's last token, does not end a turn. A plain text is tokenised
        without a template. Raises `TaskError` if there is no template, or if the template refuses the messages, leaves
        them out, rewrites earlier turns, or ends the assistant's turn without a token.
        """
        if isinstance(said, str):
            return np.asarray(self._text_ids(said, template), dtype=np.int32)
        suffix, end = self.chat.after_turn(said, template, calls, before), self.turn_end()
        ids = self._ids_after_calls(suffix, end) if suffix.others else self._rendered_ids(suffix.text)
        if ids and last == ids[0]:
            # The policy has sampled the end of its turn, or the next role.
            start = 1
        elif suffix.others and end not in ids[:1]:
            # The template writes the answers of tools in the same turn as the calls.
            start = 0
        else:
            start = self._observation_start(ids, end, last)
        return np.asarray(ids[start:], dtype=np.int32)

    def _ids_after_calls(self, suffix: AfterTurn, end: int | None) -> list[int]:
        """Return the ids of `suffix` from the turn's `end` on or, without this token, after the end of the calls."""
        ids = self._rendered_ids(suffix.text)
        common = [_common_length(ids, self._rendered_ids(other)) for other in suffix.others]
        if end in ids[: max(common)]:
            return ids[ids.index(end) :]
        closed = min(common)
        # Some templates always open an answer after calls. The text before a second call has no such opening.
        if suffix.again is not None:
            closed = min(closed, _common_length(ids, self._rendered_ids(suffix.again)))
        return ids[closed:]

    def _observation_start(self, ids: list[int], end: int | None, last: int | None) -> int:
        """Return the index in `ids`, the ids after an assistant's words, at which an observation begins."""
        first = next((token for token in ids if token in self._control.added), None)
        if end not in ids and first is not None and not self.spell(ids[: ids.index(first)]).strip():
            # Either turns end with the role of the next turn, or the last turn of a conversation ends with another
            # token than earlier turns.
            end, is_role = first, end is None
        else:
            is_role = False
        if end not in ids:
            raise TaskError("the chat template does not end an assistant's turn with a token: no turn can follow it")
        closed = last in (None, end) if is_role else last in (None, end, self.eos_id, *self._control.special)
        return ids.index(end) + 1 if closed else 0

    def encode_turn(self, completion: str, finish: str) -> Ints:
        """Return the ids [T] of a turn; `finish` "stop" adds the end of the turn. Raises `TaskError` without ids."""
        end = [self.eos_id] if finish == "stop" and self.eos_id is not None else []
        ids = [*self._ids(completion), *end]
        if not ids:
            raise TaskError(f"the completion {completion!r:.{QUOTED}} has no tokens")
        return np.asarray(ids, dtype=np.int32)

    def completion(self, tokens: Ints, sampled: Flags | None = None) -> str:
        """Return the text of a completion [T] for environments and rewards; `sampled` [T] marks the policy's tokens.

        The policy's special tokens, such as `[TOOL_CALLS]` or `<|python_tag|>`, are text, except those in `NAMED`. In
        observations special tokens are left out. `tokens` must not contain the end of a turn (`stop.Stop.text`).
        """
        if self._hides_all_special:
            return self.decode(tokens)
        ids, special = tokens.tolist(), self._control.special
        is_policys = [True] * len(ids) if sampled is None else sampled.tolist()
        visible = [
            token
            for token, by_policy in zip(ids, is_policys, strict=True)
            if token not in special or (by_policy and token not in self._hidden_ids)
        ]
        return self.spell(visible)

    def decode(self, tokens: Ints) -> str:
        """Return the text of `tokens` [T] without special tokens."""
        if self._fast is not None and self._plain:
            # `decode` of transformers wraps this call, and takes three times as long.
            return self._fast.decode(tokens.tolist())
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _rendered_ids(self, rendered: str) -> list[int]:
        return self._control.ids(rendered) if MARK in rendered else self._ids(rendered)

    def _text_ids(self, text: str, template: Template) -> list[int]:
        if template.control_tokens == "text" and self._control.find(text):
            return self._control.text_ids(text)
        return self._ids(text)

    def _prompt_text_ids(self, text: str, template: Template) -> list[int]:
        """Return the ids of a text after the leading special tokens. A bos at the start of the text is not repeated."""
        before = self._leading_ids
        if self._bos and text.startswith(self._bos):
            text = text.removeprefix(self._bos)
            number = self._tokenizer.bos_token_id
            before = before if number in before else [number, *before]
        ids = self._text_ids(text, template)
        return ids if not before or ids[: len(before)] == before else [*before, *ids]

    def _find_leading_ids(self) -> list[int]:
        with_specials, without_specials = self._ids(PROBE, specials=True), self._ids(PROBE)
        places = range(len(with_specials) - len(without_specials) + 1)
        return with_specials[
            : next((n for n in places if with_specials[n : n + len(without_specials)] == without_specials), 0)
        ]

    def _ids(self, text: str, *, specials: bool = False) -> list[int]:
        try:
            if self._fast is not None:
                # The equal call of transformers takes four times as long.
                return self._fast.encode(text, add_special_tokens=specials).ids
            return self._tokenizer(text, add_special_tokens=specials)["input_ids"]
        except TypeError as error:
            # The text has half of a surrogate pair, which JSON can represent and UTF-8 cannot.
            raise TaskError(f"not a text that can be tokenized: {text!r:.{QUOTED}}") from error


def unknown_ids(path: str | Path, rows: int) -> tuple[int, ...]:
    """Return the ids below `rows` that the tokenizer at `path` lacks; none if there is no tokenizer."""
    if _ids_in_file(Path(path) / "tokenizer.json").issuperset(range(rows)):
        return ()
    try:
        return Tokenizer(path).unknown_ids(rows)
    except TaskError:
        # Without a tokenizer all token ids are valid.
        return ()


def _ids_in_file(file: Path) -> set[int]:
    """Return the ids in a tokenizer's file; none if the file is missing or has an unknown form."""
    try:
        content = json.loads(durable.read(file))
        vocabulary = content["model"]["vocab"]
        vocabulary_ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return {*vocabulary_ids, *(token["id"] for token in content["added_tokens"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _common_length(first: Sequence[int], second: Sequence[int]) -> int:
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False))))


def _decodes_plainly(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Return True if `decode` only calls the backend's `decode`.

    transformers does not clean up the spaces of BPE tokenizers. If a setting asks for it (Llama 3), it only warns.
    """
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast as Base

    kind = type(tokenizer)
    if getattr(kind, "_decode", None) is not Base._decode or kind.decode is not Base.decode:
        return False
    is_forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    ignores = isinstance(tokenizer.backend_tokenizer.model, BPE) and not is_forced
    return ignores or not tokenizer.clean_up_tokenization_spaces


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a Hugging Face tokenizer with one token for each character; 0 is padding, 1 end-of-sequence, 2 unknown.

    A non-ASCII character is one token per byte. The tokenizer is Qwen2's without merges: for every folder of a Qwen2
    model, transformers uses Qwen2's class, which would lose spaces with other pre-tokenizers.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    pieces = "".join(piece for character in alphabet for piece, _ in bytewise.pre_tokenize_str(character))
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(["<pad>", "<eos>", "<unk>", *pieces]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = bytewise
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
