"""Converts rows of data sets to prompts."""

import json
from collections.abc import Callable, Mapping, Sequence, Sized
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias

from msgspec import structs

from streamppo.config.task import Source
from streamppo.errors import TaskError
from streamppo.tasks import chat, columns, dataset_files, files, split
from streamppo.tasks.dataset_files import QUOTED, Row
from streamppo.types import Message, Prompt, Template

ANSWER = "answer"
"""The name under which rewards get the answer, and the default name of its column."""
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
MEDIA_MARKS = tuple(f"<{name}>" for name in ("image", "video", "audio"))
"""Placeholders of pictures and sounds in prompts, for example in the rows of verl."""
SPECIALS = 8
"""Maximum number of tokens that a tokenizer adds to a text. Every other token covers at least one byte of the text."""


class Measure(Protocol):
    """The part of a tokenizer that measures prompts."""

    def render(self, prompt: Prompt) -> str: ...

    def ids(self, prompt: Prompt) -> Sized: ...


VisitPrompt: TypeAlias = Callable[[str, Prompt], object]
"""A function that is called for every prompt, with (location of its row, prompt)."""


class Data:
    """The prompts of a source, or of its first `limit` rows. Raises `TaskError` with file and row for an unusable row.

    `lengths` counts the prompts that are "skipped" or "truncated". `keys` has the `split.key` of each training prompt,
    `held_out_keys` that of each held-out prompt. `notes` are sentences about files and columns.
    """

    def __init__(
        self,
        name: str,
        source: Source,
        seed: int,
        tokenizer: Measure | None,
        limit: int | None = None,
        *,
        visit: VisitPrompt | None = None,
    ) -> None:
        evaluation = source.evaluation
        if evaluation is not None:
            evaluation = dataset_files.subset_folder(evaluation, source.subset, is_required=False)
        folder = dataset_files.subset_folder(source.data, source.subset, is_required=True)
        source = structs.replace(source, data=folder, evaluation=evaluation)
        self._name, self._source, self._tokenizer = name, source, tokenizer
        self._limit, self._visit = limit, visit
        self._omitted: dict[str, str] = {}
        self._media: set[str] = set()
        self.lengths = {"skipped": 0, "truncated": 0}
        self.notes: list[str] = []
        self.training: Sequence[Prompt] = self._read(source.data, source.split)
        self.keys = self._keys(self.training)
        self.notes += split.describe_repeats(self.keys, name)
        self.held_out: Sequence[Prompt]
        self.is_divided = source.evaluation is None and source.evaluation_split is None
        if self.is_divided:
            # If the first `limit` rows all have the same prompt, none can be held out.
            share = source.held_out if limit is None or len(set(self.keys)) > 1 else 0.0
            try:
                divided = split.divide(self.training, self.keys, share, seed)
            except TaskError as error:
                raise TaskError(f"{source.data}: {error}") from error
            self.held_out_keys = self._keys(divided.held_out)
            self.remove(set(self.held_out_keys))
            self.held_out = divided.held_out
        else:
            self.held_out = self._read(*_evaluation(source))
            self.held_out_keys = self._keys(self.held_out)
        self.notes += [
            f"{name}: the column {column!r} {why}: rewards do not get it" for column, why in self._omitted.items()
        ]
        self.notes += [
            f"{name}: rows have pictures or sounds in the column {column!r}: the policy reads only the prompt's text"
            for column in sorted(self._media)
        ]

    def remove(self, excluded: set[bytes]) -> None:
        """Remove training prompts whose keys are in `excluded`. Raises `TaskError` if no training prompt is left."""
        self.training = split.exclude(self.training, self.keys, excluded)
        self.keys = split.exclude(self.keys, self.keys, excluded)
        if not self.training:
            raise TaskError(
                f"{self._source.data}: all its prompts are held out by another source: leave this source out"
            )

    def _keys(self, prompts: Sequence[Prompt]) -> list[bytes]:
        return [split.key(prompt.text.removeprefix(self._source.system)) for prompt in prompts]

    def _read(self, data: str, of_split: str) -> Sequence[Prompt]:
        folder = Path(data)
        if folder.is_dir() and (doubtful := files.find(folder, of_split).doubtful):
            self.notes.append(
                f"{self._name}: not read, although named like the split {of_split!r} in {folder}: {', '.join(doubtful)}"
            )
        rows = islice(dataset_files.rows(data, of_split, self._source.subset), self._limit)
        fitting = [prompt for where, row in rows if (prompt := self._prompt(row, where)) is not None]
        if not fitting:
            raise TaskError(f"{data}: no rows" + (" that are short enough" if self.lengths["skipped"] else ""))
        return fitting

    def _prompt(self, row: Row, where: str) -> Prompt | None:
        """Make the prompt of a row; None if the prompt is too long and thus skipped."""
        plain = columns.plain_columns(row)
        self._omitted |= plain.omitted
        converted = prompt(plain.columns, where, self._name, self._source)
        media = {column for column in MEDIA_COLUMNS if _has_value(row.get(column))}
        if media and any(place in converted.text for place in MEDIA_MARKS):
            raise TaskError(
                f"{where}: the prompt has placeholders for the column {min(media)!r}, and the policy reads only text: "
                "leave such rows out"
            )
        self._media |= media
        if self._tokenizer is not None and not self._fits(converted, where, self._source, self._tokenizer):
            return None
        if self._visit is not None:
            self._visit(where, converted)
        return converted

    def _fits(self, prompt: Prompt, where: str, source: Source, tokenizer: Measure) -> bool:
        """Return False if the prompt is skipped. Counts a prompt that is too long."""
        limit = source.max_prompt_tokens
        try:
            if len(tokenizer.render(prompt).encode(errors="surrogatepass")) + SPECIALS <= limit:
                return True
            length = len(tokenizer.ids(prompt))
        except TaskError as error:
            raise TaskError(f"{where}: {error}") from error
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


def _evaluation(source: Source) -> tuple[str, str]:
    """Return data and split of the evaluation. Raises `TaskError` if the evaluation would use the training rows."""
    data, of_split = source.evaluation or source.data, source.evaluation_split or source.split
    if source.evaluation is None and not dataset_files.has_splits(data):
        raise TaskError(
            f"{data} has no splits, so evaluation_split would evaluate on the training rows: name other rows as "
            "`evaluation`, or use held_out"
        )
    same = data == source.data or Path(data).resolve() == Path(source.data).resolve()
    if same and (of_split == source.split or not dataset_files.has_splits(data)):
        raise TaskError(
            f"{data} has the training rows, whose accuracy measures memory: name other rows as `evaluation`, "
            "another evaluation_split, or leave both out and use held_out"
        )
    return data, of_split


def prompt(row: Row, where: str, name: str, source: Source) -> Prompt:
    """Convert one row according to `source`. Raises `TaskError` with the name of a missing column."""
    value = _column(row, source.prompt, where)
    if source.answer == source.prompt:
        value = _before_answer(value, where)
    text, messages = content(value, where, source)
    columns = reward_columns(row, where, source)
    row_source = row.get("data_source")
    template = Template(arguments=source.template, control_tokens=source.control_tokens)
    return Prompt(
        text=text,
        columns=columns,
        messages=messages,
        source=row_source if isinstance(row_source, str) else name,
        max_tokens=source.max_prompt_tokens if source.too_long == "truncate" else None,
        template=chat.template(row, source.tools, template, where) if messages else template,
    )


def _has_value(value: object) -> bool:
    return value is not None and not (isinstance(value, str | bytes | list | tuple | dict) and not value)


def reward_columns(row: Row, where: str, source: Source) -> dict[str, object]:
    """Return the columns that a row's rewards get. Raises `TaskError` with the name of a missing column."""
    columns: dict[str, object] = {**row}
    # A column `prompt` is left out, because TRL and agents pass the prompt in another form.
    if source.prompt == "prompt":
        columns.pop("prompt", None)
    columns |= {new: _column(row, old, where) for new, old in source.columns.items()}
    if source.answer and ANSWER not in source.columns:
        value = _column(row, _answer_column(row, source.answer), where)
        columns[ANSWER] = _last_answer(value, where) or value
    return columns


def _before_answer(value: object, where: str) -> object:
    """Return the messages before the answer, which is the last one. Raises `TaskError` for other values."""
    messages = _as_json(value) if isinstance(value, str) else value
    if not isinstance(messages, list) or len(messages) < 2 or not _last_answer(messages, where):
        raise TaskError(
            f"{where}: prompt and answer are the same column, so its messages must end with an assistant's answer that "
            f"is a text, not {value!r:.{QUOTED}}"
        )
    return messages[:-1]


def _last_answer(value: object, where: str) -> str:
    """Return the text of an assistant's message at the end of messages; "" if `value` does not end with one."""
    match _as_json(value) if isinstance(value, str) else value:
        case [*_, {"role": "assistant"} as last]:
            return chat.message(last, where).text
        case _:
            return ""


def present_columns(row: Row, source: Source) -> Source:
    """Return `source` without an answer or columns that the row lacks; the prompt's column stays."""
    answer = source.answer if source.answer and has_column(row, _answer_column(row, source.answer)) else ""
    return structs.replace(
        source, answer=answer, columns={new: old for new, old in source.columns.items() if has_column(row, old)}
    )


def _answer_column(row: Row, name: str) -> str:
    """Return the name of the answer's column: `reward_model.ground_truth` in verl's rows, else `name`.

    If there is `reward_model`, a column `answer` is ignored: in verl's conversion of gsm8k it has the worked solution.
    """
    nested = row.get("reward_model")
    if (name == ANSWER or name not in row) and isinstance(nested, Mapping) and "ground_truth" in nested:
        return "reward_model.ground_truth"
    return name


def has_column(row: Row, name: str) -> bool:
    """Return True if the row has a value at a dotted name."""
    try:
        _value(row, name)
    except KeyError:
        return False
    return True


def _column(row: Row, name: str, where: str) -> object:
    try:
        return _value(row, name)
    except KeyError as error:
        raise TaskError(f"{where}: no column {name!r}; columns are {', '.join(map(str, row))}") from error


def _value(row: Row, name: str) -> object:
    value: object = row
    for part in [name] if name in row else name.split("."):
        if not isinstance(value, Mapping):
            raise KeyError(part)
        value = value[part]
    return value


def content(value: object, where: str, source: Source) -> tuple[str, tuple[Message, ...]]:
    """Return (text, messages) of the prompt `value`; a text has no messages. Raises `TaskError` for other values."""
    if isinstance(value, str) and value:
        if not source.chat and not source.system and not _as_json(value):
            return value, ()
        items = _as_json(value)
        messages = [chat.message(item, where) for item in items] if items else [Message(role="user", content=value)]
    elif isinstance(value, list) and value:
        messages = [chat.message(item, where) for item in value]
    else:
        raise TaskError(
            f"{where}: the prompt must be a string or a list of messages that is not empty, not {value!r:.{QUOTED}}"
        )
    if source.system:
        if any(message.role in ("system", "developer") for message in messages):
            raise TaskError(
                f"{where}: the prompt has a system message, and task.system is a second: leave one of them out"
            )
        messages.insert(0, Message(role="system", content=source.system))
    return "\n\n".join(message.text for message in messages), tuple(messages)


def _as_json(text: str) -> list[object]:
    """Return the messages of a text that is a JSON list of messages; [] for any other text."""
    if not text.lstrip().startswith("["):
        return []
    try:
        items = json.loads(text)
    except (ValueError, RecursionError):
        return []
    is_chat = isinstance(items, list) and all(isinstance(item, dict) and "role" in item for item in items)
    return items if is_chat else []
