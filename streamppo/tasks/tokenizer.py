"""Text to token ids and back, by the model's own tokenizer; and the character tokenizer of builtin:tiny."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from streamppo.errors import TaskError
from streamppo.tasks import chat_template, stop
from streamppo.tasks.chat_template import PLAIN, AfterTurn, Calls, ChatTemplate
from streamppo.tasks.control_tokens import MARK, ControlTokens
from streamppo.types import Flags, Ints, Message, Prompt, Template, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Said: TypeAlias = str | tuple[Message, ...]
"""An environment's words: messages for the chat template, or a text as it is."""
PADDING, END = 0, 1
"""Token ids of the character tokenizer."""
SPECIALS = 3
"""Token ids before those of its characters: these two and that of an unknown one."""

KEPT = 256
"""Prompts whose tokens are kept: more than begin together, and their samples are played one soon after another."""
PROBE = "a"
"""A text whose tokens are looked for between those that a tokenizer adds."""
DAMAGE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)
"""Errors that transformers raises for files of a tokenizer which nobody wrote."""
UNKNOWN = -1
"""In place of a token that has not been asked for."""
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that every tokenizer may have, by name: they are never part of an answer."""


class Tokenizer:
    """A thin face on the Hugging Face tokenizer of a model folder or hub name. Raises `TaskError` if there is none.

    A chat template that writes the time writes that of `clock` (ISO 8601); without one that of the call.
    """

    def __init__(self, path: str | Path, clock: str = "") -> None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except (*DAMAGE, StrictDataclassError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise TaskError(f"the tokenizer of {str(path)!r} cannot be loaded: {reason}") from error
        self._fast = self._tokenizer.backend_tokenizer if self._tokenizer.is_fast else None
        if self._fast is not None:
            # Its file may ask for both; transformers turns them off at each call.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._plain = _decodes_plainly(self._tokenizer)
        self.eos_id: int | None = self._tokenizer.eos_token_id
        self.vocabulary = len(self._tokenizer)
        # Without its files transformers makes one that knows nothing but its special tokens.
        if self.vocabulary <= len(self._tokenizer.all_special_ids):
            raise TaskError(f"{path}: no tokenizer is there")
        self._control = ControlTokens(self._tokenizer, self._fast, chat_template.sources(self._tokenizer))
        self._chat = ChatTemplate(self._tokenizer, self._control, clock)
        self._bos: str = self._tokenizer.bos_token or ""
        self._silent = {getattr(self._tokenizer, f"{name}_token_id") for name in NAMED}
        self._hides_all = self._control.special <= self._silent
        self._before = self._put_before()
        self._turn_end: int | None = UNKNOWN
        self._encoded: dict[tuple[str | bytes, int | None], Ints] = {}

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        """The tokenizer as transformers has it."""
        return self._tokenizer

    @property
    def has_template(self) -> bool:
        """True if it has a chat template."""
        return bool(self._tokenizer.chat_template)

    def response_parser(self) -> Callable[[str], object] | None:
        """Return the function that reads a turn's text by the tokenizer's `response_schema`; None if it has none."""
        schema = getattr(self._tokenizer, "response_schema", None)
        return None if schema is None else lambda text: self._tokenizer.parse_response(text, schema)

    def numbers(self) -> dict[str, int]:
        """Return the id of every token by its text."""
        return self._tokenizer.get_vocab()

    def texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each of `tokens` by itself, special ones too."""
        return [self._tokenizer.decode([token]) for token in tokens]

    def name(self, token: int) -> str:
        """Return the text of one token, or what it is if it has none."""
        return self._tokenizer.convert_ids_to_tokens(token) or "no token"

    def unknown(self, vocabulary: int) -> tuple[int, ...]:
        """Return the ids below `vocabulary` that are none of its tokens: rows that models have beyond them."""
        return tuple(sorted(set(range(vocabulary)).difference(self.numbers().values())))

    def spell(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special ones too."""
        if self._fast is not None and self._plain:
            return self._fast.decode(tokens, skip_special_tokens=False)
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def spread(self, count: int) -> list[int]:
        """Return `count` token ids at most, in rising order and evenly over all that have a text."""
        known = sorted(set(self.numbers().values()))
        picked = [known[n * (len(known) - 1) // max(1, count - 1)] for n in range(count)]
        return list(dict.fromkeys(picked))

    def render(self, prompt: Prompt) -> str:
        """Return the text of a prompt: its messages in the chat template, with the opening of the answer; or its text.

        An assistant's message at the end is continued. Raises `TaskError` if it has messages and the tokenizer no
        template, or one that refuses them.
        """
        if not prompt.messages:
            return prompt.text
        return self._control.restore(self._chat.render(prompt.messages, prompt.template))

    def find_control_token(self, prompt: Prompt) -> str | None:
        """Return the first special token that the words of a prompt spell, if there is one."""
        texts = [message.text for message in prompt.messages] or [prompt.text.removeprefix(self._bos)]
        return next((name for text in texts if (name := self._control.find(text))), None)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return all token ids of a prompt. Raises `TaskError` if there are none.

        The template writes its special tokens itself. A text gets those that the tokenizer puts before a text, once,
        and none behind it: the policy goes on there.
        """
        if prompt.messages:
            ids = self._rendered_ids(self._chat.render(prompt.messages, prompt.template))
        else:
            ids = self._prompt_text_ids(prompt.text, prompt.template)
        if not ids:
            raise TaskError(f"the prompt {prompt.text!r} has no tokens")
        return ids

    def encode(self, prompt: Prompt) -> Ints:
        """Return the token ids [P] of a prompt, cut to its `max_tokens`; read-only, for its samples share them."""
        is_plain = not prompt.messages and prompt.template.control_tokens == "text"
        key = prompt.text if is_plain else encode((prompt.text, prompt.messages, prompt.template))
        kept = self._encoded.get((key, prompt.max_tokens))
        if kept is not None:
            return kept
        ids = self.ids(prompt)
        made = np.asarray(ids if prompt.max_tokens is None else ids[-prompt.max_tokens :], dtype=np.int32)
        made.flags.writeable = False
        if len(self._encoded) >= KEPT:
            del self._encoded[next(iter(self._encoded))]
        self._encoded[key, prompt.max_tokens] = made
        return made

    def turn_end(self) -> int | None:
        """Return the token that the chat template writes behind an assistant's message; None if it writes none.

        It is the first special or added token there: `<|im_end|>` of Qwen, `<end_of_turn>` of Gemma, none of GLM, whose
        turns end with the role of the next one.
        """
        if self._turn_end is UNKNOWN:
            self._turn_end = stop.end_of_turn(self._tokenizer)
        return self._turn_end

    def observation(self, said: Said, template: Template = PLAIN, last: int | None = None, calls: Calls = ()) -> Ints:
        """Return the token ids [O] of an environment's words after a turn, with the opening of the next turn.

        The policy's own tokens are not tokenised again: a conversation is rendered with other words in their place,
        and what the template writes behind them follows; `calls` are those with which the turn ends, if these are
        known. The token that ends the turn is among it only if `last`, the turn's last token, is none that ends one. A
        text is taken as it is. Raises `TaskError` without a template, and for one that refuses the messages, leaves
        them out, rewrites earlier turns, or ends the assistant's turn with no token.
        """
        if isinstance(said, str):
            return np.asarray(self._text_ids(said, template), dtype=np.int32)
        behind, end = self._chat.after_turn(said, template, calls), self.turn_end()
        ids = self._behind_calls(behind, end) if behind.others else self._rendered_ids(behind.text)
        if ids and last == ids[0]:
            # The policy has sampled the end of its turn, or the role of the next one.
            begin = 1
        elif behind.others and end not in ids[:1]:
            # The answers follow the calls in the same turn.
            begin = 0
        else:
            begin = self._behind_end(ids, end, last)
        return np.asarray(ids[begin:], dtype=np.int32)

    def _behind_calls(self, behind: AfterTurn, end: int | None) -> list[int]:
        """Return the ids of a text behind calls, without what closes these; the end of the turn is among them."""
        ids = self._rendered_ids(behind.text)
        closed = min(_common(ids, self._rendered_ids(other)) for other in behind.others)
        if end in ids[:closed]:
            return ids[ids.index(end) :]
        # A template may open the first answer already, which a second call would not stand behind.
        again = [] if behind.again is None else [_common(ids, self._rendered_ids(behind.again))]
        return ids[min([closed, *again]) :]

    def _behind_end(self, ids: list[int], end: int | None, last: int | None) -> int:
        """Find the place in `ids`, which follow an assistant's words, at which an observation begins."""
        if end not in ids and ids and ids[0] in self._control.added:
            # Turns that end with the role of the next one, or in a conversation with another token than at its end.
            end, is_role = ids[0], end is None
        else:
            is_role = False
        if end not in ids:
            raise TaskError("the chat template does not end an assistant's turn with a token: no turn can follow it")
        closed = last in (None, end) if is_role else last is None or self._ends_turn(last, end)
        return ids.index(end) + 1 if closed else 0

    def _ends_turn(self, last: int | None, end: int | None) -> bool:
        return last in (end, self.eos_id) or last in self._control.special

    def encode_turn(self, completion: str, finish: str) -> Ints:
        """Return the token ids [T] of a turn of the policy, with the end of the turn for a `finish` of "stop".

        Raises `TaskError` if there are none.
        """
        end = [self.eos_id] if finish == "stop" and self.eos_id is not None else []
        ids = [*self._ids(completion), *end]
        if not ids:
            raise TaskError(f"the completion {completion!r} has no tokens")
        return np.asarray(ids, dtype=np.int32)

    def completion(self, tokens: Ints, sampled: Flags | None = None) -> str:
        """Return the text of a completion [T] as environments and rewards read it; `sampled` [T] are the policy's own.

        The policy's special tokens are text, such as `[TOOL_CALLS]` or `<|python_tag|>`, but for those that the
        tokenizer has by name (bos, eos, pad, unk). An observation has none of them. The end of a turn is not among
        `tokens` (`stop.Stop.text`).
        """
        if self._hides_all:
            return self.decode(tokens)
        ids, special = tokens.tolist(), self._control.special
        policys = [True] * len(ids) if sampled is None else sampled.tolist()
        shown = [
            one
            for one, own in zip(ids, policys, strict=True)
            if one not in special or (own and one not in self._silent)
        ]
        if self._fast is not None and self._plain:
            return self._fast.decode(shown, skip_special_tokens=False)
        return self._tokenizer.decode(shown, skip_special_tokens=False)

    def decode(self, tokens: Ints) -> str:
        """Return the text of `tokens` [T], special tokens left out."""
        if self._fast is not None and self._plain:
            # A third of the time of the other way, which ends in the same call.
            return self._fast.decode(tokens.tolist())
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _rendered_ids(self, rendered: str) -> list[int]:
        return self._control.ids(rendered) if MARK in rendered else self._ids(rendered)

    def _text_ids(self, text: str, template: Template) -> list[int]:
        if template.control_tokens == "text" and self._control.find(text):
            return self._control.text_ids(text)
        return self._ids(text)

    def _prompt_text_ids(self, text: str, template: Template) -> list[int]:
        """The ids of a text with those that the tokenizer puts before it; a bos that the text spells is one of them."""
        before = self._before
        if self._bos and text.startswith(self._bos):
            text = text.removeprefix(self._bos)
            number = self._tokenizer.bos_token_id
            before = before if number in before else [number, *before]
        ids = self._text_ids(text, template)
        return ids if not before or ids[: len(before)] == before else [*before, *ids]

    def _put_before(self) -> list[int]:
        """The ids that the post-processor puts before a text."""
        with_them, alone = self._ids(PROBE, specials=True), self._ids(PROBE)
        places = range(len(with_them) - len(alone) + 1)
        return with_them[: next((n for n in places if with_them[n : n + len(alone)] == alone), 0)]

    def _ids(self, text: str, *, specials: bool = False) -> list[int]:
        try:
            if self._fast is not None:
                # A quarter of the time of the other way, which ends in the same call.
                return self._fast.encode(text, add_special_tokens=specials).ids
            return self._tokenizer(text, add_special_tokens=specials)["input_ids"]
        except TypeError as error:
            # Half of a surrogate pair, which JSON can write and UTF-8 cannot.
            raise TaskError(f"no text that can be tokenized: {text!r}") from error


def unknown(path: str | Path, rows: int) -> tuple[int, ...]:
    """Return the ids below `rows` that the tokenizer at `path` does not have; none if there is no tokenizer.

    transformers, which takes seconds to import, is asked only where the tokenizer's own file lacks some.
    """
    if _ids_in_file(Path(path) / "tokenizer.json").issuperset(range(rows)):
        return ()
    try:
        return Tokenizer(path).unknown(rows)
    except TaskError:
        # Token ids go in and come out.
        return ()


def _ids_in_file(file: Path) -> set[int]:
    """The ids in a tokenizer's file; none if there is no such file, or one of another form."""
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        listed = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return {*listed, *(token["id"] for token in content["added_tokens"])}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return set()


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Count the tokens with which both begin."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _decodes_plainly(tokenizer: PreTrainedTokenizerFast) -> bool:
    """True if its `decode` is the backend's and nothing else: no spaces are cleaned up, no class has one of its own."""
    from transformers import PreTrainedTokenizerFast

    base = PreTrainedTokenizerFast
    ours = type(tokenizer)
    same = getattr(ours, "_decode", None) is base._decode and ours.decode is base.decode
    return same and not tokenizer.clean_up_tokenization_spaces


def character_tokenizer(alphabet: str) -> PreTrainedTokenizerFast:
    """Make a Hugging Face tokenizer with one token for each character; 0 is padding, 1 end-of-sequence, 2 unknown.

    A character beyond ASCII is the tokens of its bytes. This is Qwen2's own tokenizer without merges: transformers
    makes one of that class for every folder of a Qwen2 model, and would lose spaces that are written in another way.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    bytewise = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    written = "".join(piece for one in alphabet for piece, _ in bytewise.pre_tokenize_str(one))
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys(["<pad>", "<eos>", "<unk>", *written]))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = bytewise
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
