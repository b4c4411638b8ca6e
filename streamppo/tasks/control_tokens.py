"""Separates a tokenizer's control tokens from untrusted text that spells their names.

A row or a tool's output may contain "<|im_end|>" or "<tool_call>". A tokenizer would turn every such name into the
control token. `ControlTokens` makes control tokens only of names that the chat template writes:

    escape    names in the messages are replaced by letters and a number before the template is rendered
    ids       a twin of the tokenizer, whose control tokens have private names, tokenises the rendered text:
              the template's names become private names; escaped names become names again, plain text for the twin

The twin splits, merges and normalises texts as the tokenizer does. The twin is made when a text first contains the name
of a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar, cast

from streamppo.errors import TaskError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend
    from transformers import PreTrainedTokenizerBase

MARK = "qk7vTextOfControlToken"
"""Prefix of an escaped name. It has only letters and digits, which a template that writes JSON does not escape."""
ESCAPED = re.compile(f"{MARK}(\\d+)z")
DELIMITER = "\U0010fffd"
"""Delimiter of private names of control tokens: a private-use character."""
RENAMED = ("Unigram", "WordLevel", "WordPiece")
"""Tokenizer models whose vocabulary may list a control token's name as a word."""
LIST_ENTRY = "chat_control_tokens"
"""The entry of tokenizer_config.json that lists the control tokens of a chat template."""
TRUSTED_ROLES = ("system", "assistant")
"""Roles whose messages keep non-special markers, such as thinking tags, as control tokens."""
T = TypeVar("T")


class ControlTokens:
    """The control tokens of a tokenizer: its special tokens, and the other added tokens in a chat template."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, backend: Backend | None, templates: Iterable[str]) -> None:
        self._backend = backend
        added = {number: token for number, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
        self.added = frozenset(added)
        self.special = frozenset({number for number, token in added.items() if token.special})
        # If a template composes a name from parts, the tokenizer's configuration lists the name. Older transformers
        # keep the list of names in init_kwargs.
        listed_names = getattr(tokenizer, LIST_ENTRY, None) or tokenizer.init_kwargs.get(LIST_ENTRY) or ()
        source = "\n".join([*templates, *listed_names])
        markers = [token.content for number, token in added.items() if number not in self.special]
        self._names = [token.content for number, token in added.items() if number in self.special]
        self._special_names = _any_of(self._names)
        self._names += [name for name in markers if name in source]
        self._all_names = _any_of(self._names)
        self._ids: dict[str, int] = {token.content: number for number, token in added.items()}
        self._unknown = self._ids.get(str(tokenizer.unk_token))

    def find(self, text: str) -> str | None:
        """Return the name of the first special token in `text`, if there is one."""
        return match[0] if self._special_names and (match := self._special_names.search(text)) else None

    def escape(self, value: T, role: str) -> T:
        """Escape the names of control tokens in a text of a message with `role`, or in all texts of a dict or list.

        Names of special tokens are escaped in every role, names of other markers only outside `TRUSTED_ROLES`. Raises
        `TaskError` for a text that contains `MARK` or `DELIMITER`.
        """
        pattern = self._special_names if role in TRUSTED_ROLES else self._all_names
        return value if pattern is None else cast(T, self._escape(value, pattern))

    def _escape(self, value: object, pattern: re.Pattern[str]) -> object:
        match value:
            case str():
                _refuse_marks(value)
                return pattern.sub(lambda match: f"{MARK}{self._names.index(match[0])}z", value)
            case dict():
                return {self._escape(key, pattern): self._escape(item, pattern) for key, item in value.items()}
            case list() | tuple():
                return [self._escape(item, pattern) for item in value]
            case _:
                return value

    def restore(self, text: str) -> str:
        return ESCAPED.sub(lambda match: self._names[int(match[1])], text) if MARK in text else text

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of a text in which control tokens' names are plain text. Raises `TaskError` as `ids` does."""
        _refuse_marks(text)
        return self._encode(text, 0)

    def ids(self, rendered: str) -> list[int]:
        """Return the ids of rendered text. Raises `TaskError` if an escaped name can only be its control token."""
        private, num_written = rendered, 0
        if self._all_names is not None:
            private, num_written = self._all_names.subn(lambda match: _private(self._names.index(match[0])), rendered)
        return self._encode(self.restore(private), num_written)

    def _encode(self, text: str, num_written: int) -> list[int]:
        twin, numbers = self._twin
        twin_ids: list[int] = twin.encode(text, add_special_tokens=False).ids
        ids = [numbers.get(token, token) for token in twin_ids]
        control = {self._ids[name] for name in self._names if self._ids[name] != self._unknown}
        if sum(token in control for token in ids) != num_written:
            raise TaskError(
                f"the tokenizer can write {self._all_names and self._all_names.findall(text)[:3]} only by its control "
                'tokens: remove it from the text, or choose control_tokens = "parse"'
            )
        return ids

    @cached_property
    def _twin(self) -> tuple[Backend, dict[int, int]]:
        """The twin, whose control tokens have private names, and {id in the twin: id in the tokenizer}."""
        from tokenizers import Tokenizer as Backend

        if self._backend is None:
            raise TaskError(
                "a text spells a control token, and only a fast tokenizer can keep it as text: save this one with a "
                'tokenizer.json, or choose control_tokens = "parse"'
            )
        content = json.loads(self._backend.to_str())
        renamed = {name: _private(number) for number, name in enumerate(self._names)}
        for token in content["added_tokens"]:
            token["content"] = renamed.get(token["content"], token["content"])
        content |= {"post_processor": None, "truncation": None, "padding": None}
        _rename(content["model"], renamed)
        twin = Backend.from_str(json.dumps(content))
        return twin, {_number(twin, renamed.get(name, name)): number for name, number in self._ids.items()}


def _number(backend: Backend, name: str) -> int:
    number = backend.token_to_id(name)
    assert number is not None, "the twin has every added token"
    return number


def _any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """Return a pattern that matches the longest name at each position, as tokenizers do."""
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _private(number: int) -> str:
    return f"{DELIMITER}{number}{DELIMITER}"


def _refuse_marks(text: str) -> None:
    for mark in (MARK, DELIMITER):
        if mark in text:
            raise TaskError(f"a text contains {mark!r}, which is reserved for control tokens: remove it")


def _rename(model: dict[str, object], renamed: Mapping[str, str]) -> None:
    if model["type"] not in RENAMED:
        return
    match model["vocab"]:
        case list(pieces):
            model["vocab"] = [[renamed.get(piece, piece), score] for piece, score in pieces]
        case dict(words):
            model["vocab"] = {renamed.get(word, word): number for word, number in words.items()}
        case _:
            pass
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = renamed.get(unknown, unknown)
