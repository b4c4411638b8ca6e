"""Text to token ids and back, by the model's own tokenizer; and the character tokenizer of builtin:tiny."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from jinja2 import TemplateError

from streamppo.errors import TaskError
from streamppo.types import Ints, Message, Prompt

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


class Tokenizer:
    """A thin face on the Hugging Face tokenizer of a model folder or hub name. Raises `TaskError` if there is none."""

    def __init__(self, path: str | Path) -> None:
        from huggingface_hub.errors import StrictDataclassError
        from transformers import AutoTokenizer

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False)
        except (OSError, ValueError, StrictDataclassError) as error:
            raise TaskError(f"the tokenizer of {str(path)!r} cannot be loaded: {error}") from error
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
        self._encoded = lru_cache(maxsize=KEPT)(self._encode)

    @property
    def hf(self) -> PreTrainedTokenizerFast:
        """The tokenizer as transformers has it."""
        return self._tokenizer

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

        Raises `TaskError` if it has messages and the tokenizer no template, or one that refuses them.
        """
        if not prompt.messages:
            return prompt.text
        return self._chat(prompt.messages, open_turn=True)

    def ids(self, prompt: Prompt) -> list[int]:
        """Return all token ids of a prompt. Raises `TaskError` if there are none."""
        # The template writes its special tokens itself.
        ids = self._ids(self.render(prompt), specials=not prompt.messages)
        if not ids:
            raise TaskError(f"the prompt {prompt.text!r} has no tokens")
        return ids

    def encode(self, prompt: Prompt) -> Ints:
        """Return the token ids [P] of a prompt, cut to its `max_tokens`; read-only, for its samples share them."""
        return self._encoded(prompt.text, prompt.messages, prompt.max_tokens)

    def _encode(self, text: str, messages: tuple[Message, ...], max_tokens: int | None) -> Ints:
        ids = self.ids(Prompt(text=text, columns={}, messages=messages))
        made = np.asarray(ids if max_tokens is None else ids[-max_tokens:], dtype=np.int32)
        made.flags.writeable = False
        return made

    def observation(self, said: Said) -> Ints:
        """Return the token ids [O] of an environment's words after a turn, with the opening of the next turn.

        The policy's own tokens are not tokenised again: the chat template is asked for the tokens that follow the
        end-of-sequence token of an assistant's turn. A text is taken as it is. Raises `TaskError` without a template,
        and for one that refuses the messages, rewrites earlier turns, or ends the assistant's turn in another way.
        """
        if isinstance(said, str):
            return np.asarray(self._ids(said), dtype=np.int32)
        turn = (Message(role="user", content="?"), Message(role="assistant", content="!"))
        before = self._ids(self._chat(turn, open_turn=False))
        after = self._ids(self._chat((*turn, *said), open_turn=True))
        if after[: len(before)] != before:
            raise TaskError("the chat template rewrites earlier turns: an environment's messages cannot be appended")
        if self.eos_id not in before:
            raise TaskError("the chat template does not end an assistant's turn with the end-of-sequence token")
        end = len(before) - before[::-1].index(self.eos_id)
        return np.asarray(after[end:], dtype=np.int32)

    def sampled(self, completion: str, finish: str) -> Ints:
        """Return the token ids [T] of a turn of the policy, with the end of the turn for a `finish` of "stop".

        Raises `TaskError` if there are none.
        """
        end = [self.eos_id] if finish == "stop" and self.eos_id is not None else []
        ids = [*self._ids(completion), *end]
        if not ids:
            raise TaskError(f"the completion {completion!r} has no tokens")
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Ints) -> str:
        """Return the text of `tokens` [T], special tokens left out."""
        if self._fast is not None and self._plain:
            # A third of the time of the other way, which ends in the same call.
            return self._fast.decode(tokens.tolist())
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)

    def _chat(self, messages: tuple[Message, ...], *, open_turn: bool) -> str:
        if not self._tokenizer.chat_template:
            raise TaskError("the prompts are messages, but the model's tokenizer has no chat template")
        chat = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return self._tokenizer.apply_chat_template(chat, add_generation_prompt=open_turn, tokenize=False)
        except TemplateError as error:
            raise TaskError(f"the chat template refuses the messages: {error}") from error

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
    if _written(Path(path) / "tokenizer.json").issuperset(range(rows)):
        return ()
    try:
        return Tokenizer(path).unknown(rows)
    except TaskError:
        # Token ids go in and come out.
        return ()


def _written(file: Path) -> set[int]:
    """The ids in a tokenizer's file; none if there is no such file, or one of another form."""
    try:
        content = json.loads(file.read_bytes())
        vocabulary = content["model"]["vocab"]
        listed = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        return {*listed, *(token["id"] for token in content["added_tokens"])}
    except (OSError, ValueError, KeyError, TypeError):
        return set()


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
