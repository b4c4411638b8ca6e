"""From the rows of data sets to prompts."""

from collections.abc import Mapping, Sequence, Sized
from itertools import islice
from typing import Protocol

import numpy as np

from streamppo.config.task import Source
from streamppo.errors import TaskError
from streamppo.tasks import chat, read
from streamppo.tasks.read import Row
from streamppo.types import Message, Prompt, Template

SPECIALS = 8
"""Tokens that a tokenizer may add to a text; all others stand for at least a byte of it."""


class Measure(Protocol):
    """The part of a tokenizer that measures a prompt."""

    def render(self, prompt: Prompt) -> str:
        """Return the whole text of a prompt."""
        ...

    def ids(self, prompt: Prompt) -> Sized:
        """Return the tokens of a prompt."""
        ...


class Data:
    """The rows of one source, or its first `limit`. Raises `TaskError` with file and row for one it cannot use.

    `lengths` counts the training prompts that were "skipped" or will be "truncated".
    """

    def __init__(
        self, name: str, source: Source, seed: int, tokenizer: Measure | None, limit: int | None = None
    ) -> None:
        self._limit = limit
        self.lengths = {"skipped": 0, "truncated": 0}
        self.training: Sequence[Prompt] = self._read(name, source, source.data, source.split, tokenizer)
        self.held_out: Sequence[Prompt]
        if source.evaluation is not None or source.evaluation_split is not None:
            data, split = source.evaluation or source.data, source.evaluation_split or source.split
            if source.evaluation is None and not read.has_splits(data):
                raise TaskError(
                    f"{data} is its own split, so evaluation_split would evaluate on what is trained on: "
                    "name other rows as `evaluation`, or use held_out"
                )
            self.held_out = self._read(name, source, data, split, tokenizer)
            return
        rows = self.training
        order = np.random.default_rng((seed, 0xF11E)).permutation(len(rows))
        cut = round(source.held_out * len(rows))
        self.held_out = [rows[int(i)] for i in order[:cut]]
        self.training = [rows[int(i)] for i in sorted(order[cut:])]
        if not self.training:
            raise TaskError(f"{source.data}: all {len(rows)} rows are held out: lower held_out")

    def _read(self, name: str, source: Source, data: str, split: str, tokenizer: Measure | None) -> list[Prompt]:
        rows = islice(read.rows(data, split, source.subset), self._limit)
        found = ((where, prompt(row, where, name, source)) for where, row in rows)
        fitting = [made for where, made in found if tokenizer is None or self._fits(made, where, source, tokenizer)]
        if not fitting:
            raise TaskError(f"{data}: no rows" + (" that are short enough" if self.lengths["skipped"] else ""))
        return fitting

    def _fits(self, made: Prompt, where: str, source: Source, tokenizer: Measure) -> bool:
        """Tell if the prompt is used at all, and count it if it is too long."""
        limit = source.max_prompt_tokens
        if len(tokenizer.render(made).encode(errors="surrogatepass")) + SPECIALS <= limit:
            return True
        length = len(tokenizer.ids(made))
        if length <= limit:
            return True
        match source.too_long:
            case "error":
                raise TaskError(
                    f"{where}: a prompt of {length} tokens is longer than max_prompt_tokens ({limit}): "
                    'raise it, or choose too_long = "skip" or "truncate"'
                )
            case "skip":
                self.lengths["skipped"] += 1
                return False
            case "truncate":
                self.lengths["truncated"] += 1
                return True


def prompt(row: Row, where: str, name: str, source: Source) -> Prompt:
    """Map one row as the source says. Raises `TaskError` that names a column that is missing."""
    text, messages = content(_column(row, source.prompt, where), where, source)
    columns = {key: value for key, value in row.items() if key != source.prompt}
    columns |= {new: _column(row, old, where) for new, old in source.columns.items()}
    if source.answer:
        columns["answer"] = _column(row, _answer_column(row, source.answer), where)
    of = row.get("data_source")
    return Prompt(
        text=text,
        columns=columns,
        messages=messages,
        source=of if isinstance(of, str) else name,
        max_tokens=source.max_prompt_tokens if source.too_long == "truncate" else None,
        template=_template(row, where, source, chats=bool(messages)),
    )


def _template(row: Row, where: str, source: Source, *, chats: bool) -> Template:
    """Return the inputs of the chat template besides the messages; a text has none of its row's."""
    base = Template(arguments=source.template, control_tokens=source.control_tokens)
    return chat.template(row, source.tools, base, where) if chats else base


def _answer_column(row: Row, name: str) -> str:
    """Name the column of the answer, which verl keeps one level down."""
    nested = row.get("reward_model")
    if name not in row and isinstance(nested, Mapping) and "ground_truth" in nested:
        return "reward_model.ground_truth"
    return name


def _column(row: Row, name: str, where: str) -> object:
    """Return the value at a dotted name."""
    value: object = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise TaskError(f"{where}: no column {name!r}; columns are {', '.join(map(str, row))}")
        value = value[part]
    return value


def content(value: object, where: str, source: Source) -> tuple[str, tuple[Message, ...]]:
    """Return (text, messages) of a prompt as the source writes it; no messages for a plain text.

    The text of messages is their contents, one after another. Raises `TaskError` for a value that is no prompt.
    """
    if isinstance(value, str) and value:
        if not source.chat and not source.system:
            return value, ()
        messages = [Message(role="user", content=value)]
    elif isinstance(value, list) and value:
        messages = [chat.message(item, where) for item in value]
    else:
        raise TaskError(f"{where}: the prompt must be a string or a list of messages that is not empty, not {value!r}")
    if source.system:
        messages.insert(0, Message(role="system", content=source.system))
    return "\n\n".join(message.text for message in messages), tuple(messages)
