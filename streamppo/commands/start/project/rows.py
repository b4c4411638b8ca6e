"""Reads a user's rows: the columns of prompt and answer, the number of rows, and lengths in tokens."""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import islice
from types import MappingProxyType
from typing import NamedTuple, cast

from streamppo.config.reward import FunctionScorer
from streamppo.config.task import Source
from streamppo.errors import ConfigError, TaskError
from streamppo.tasks import data as data_sets
from streamppo.tasks import dataset_files, split
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards.scoring import detect
from streamppo.tasks.scorers import gold
from streamppo.types import Prompt

PROMPTS = (
    *("prompt", "question", "problem", "messages", "instruction", "query", "input"),
    *("conversation", "conversations", "text"),
)
"""Usual names of a prompt's column in lower case, with the most certain first."""
ANSWERS = (
    *("reward_model.ground_truth", "answer", "ground_truth", "final_answer", "solution", "target", "expected_answer"),
    *("reference", "gold", "label", "response", "completion", "output", "chosen"),
)
"""Usual names of an answer's column in lower case, with the most certain first."""
NONE: Mapping[str, str] = MappingProxyType({})
EXAMINED = 64
QUOTED = 60
LONG = 0.99
"""The share of answers that count as usual; longer answers are ignored."""
MEASURED = 10_000


class PromptView(NamedTuple):
    """A model's view of a prompt: its tokens, whether its text `spells` control tokens, and a `chat` template."""

    measure: Callable[[Prompt], int]
    spells: Callable[[Prompt], bool] = lambda prompt: False
    chat: bool = False


class DataRows(NamedTuple):
    """The `total` rows of the data set `data`. Prompts are lists of messages if `messages` is True, else texts.

    In the first `MEASURED` rows, `prompts` are the tokens of each prompt, `answers` those of each answer that is a text
    or number, and `keys` are equal for equal prompts. `templated` is True if the texts are already written in a chat
    template. `columns` are further columns for the reward, by the name that it uses.
    """

    data: str
    total: int
    prompt: str
    answer: str
    messages: bool
    prompts: Sequence[int]
    answers: Sequence[int]
    keys: Sequence[bytes]
    templated: bool = False
    columns: Mapping[str, str] = NONE

    @property
    def longest_prompt(self) -> int:
        return max(self.prompts)

    @property
    def longest_answer(self) -> int:
        """Tokens of the longest answer that is a text or number; 0 without such an answer."""
        return max(self.answers, default=0)

    @property
    def long_answer(self) -> int:
        """The number of tokens that `LONG` of the answers do not exceed; 0 without answers."""
        return sorted(self.answers)[math.ceil(LONG * len(self.answers)) - 1] if self.answers else 0

    def held_out(self, share: float, longest: int) -> int:
        """The number of prompts of up to `longest` tokens that a share of the rows holds out, repeated ones once."""
        distinct = {key for key, length in zip(self.keys, self.prompts, strict=True) if length <= longest}
        return split.held_out_count(len(distinct) * self.total // len(self.prompts), share)


def read(
    data: str,
    rewards: Sequence[FunctionScorer],
    columns: tuple[str, str],
    view: PromptView,
    more: Mapping[str, str] = NONE,
) -> DataRows:
    """Read the rows of `data` with prompt and answer in `columns`. For the name "", a usual name is tried.

    `more` are further columns for the rewards, by the name that these use. Raises `ConfigError` if no column is the
    prompt, or if a column that a reward needs is missing.
    """
    try:
        rows = [row for _, row in islice(dataset_files.rows(data, "train"), MEASURED)]
        total = len(rows) + sum(1 for _ in islice(dataset_files.rows(data, "train"), len(rows), None))
        signatures = [detect(reward)[0] for reward in rewards]
    except TaskError as error:
        raise ConfigError(str(error)) from error
    if not rows:
        raise ConfigError(f"{data}: no rows")
    first = rows[:EXAMINED]
    prompt = _prompt_column(data, first, columns[0])
    answer = _answer_column(data, first, columns[1], prompt)
    if all(_has_answer(_at(row, prompt)) for row in first):
        # The last message is no part of the prompt, also if the rewards get the answer of another column.
        more = more if answer in ("", prompt) else {"answer": answer, **more}
        answer = prompt
    for reward, signature in zip(rewards, signatures, strict=True):
        _refuse_gaps(data, rows, reward, signature.required_columns - more.keys() - ({"answer"} if answer else set()))
    messages = isinstance(_at(rows[0], prompt), list)
    templated = not messages and all(view.spells(Prompt(text=str(_at(row, prompt)), columns={})) for row in rows)
    source = Source(
        data=data,
        prompt=prompt,
        answer=answer,
        columns=dict(more),
        chat=view.chat and not templated,
        control_tokens="parse" if templated else "text",
    )
    try:
        prompts = [data_sets.prompt(row, f"{data}, row {place}", "data", source) for place, row in enumerate(rows, 1)]
        lengths = [_length(view, row_prompt, f"{data}, row {place}") for place, row_prompt in enumerate(prompts, 1)]
        texts = [text for row_prompt in prompts if (text := gold.completion(row_prompt.columns.get("answer")))]
        answers = [view.measure(Prompt(text=text, columns={})) for text in texts]
    except TaskError as error:
        raise ConfigError(str(error)) from error
    keys = [split.key(row_prompt.text) for row_prompt in prompts]
    return DataRows(data, total, prompt, answer, messages, lengths, answers, keys, templated, more)


def _refuse_gaps(data: str, rows: Sequence[Row], reward: FunctionScorer, required_columns: Set[str]) -> None:
    """Raise `ConfigError` for the first row without a column that `reward` needs. An answer must not be null."""
    for place, row in enumerate(rows, 1):
        missing = {name for name in required_columns if name not in row or (name == "answer" and row[name] is None)}
        if missing:
            has = ", ".join(name for name, value in row.items() if value is not None)
            name = "answer" if "answer" in missing else min(missing)
            option = "the column of the answer with --answer" if name == "answer" else f"it with --column {name}=COLUMN"
            raise ConfigError(
                f"{reward.function} asks for the column {name!r}, and row {place} of {data} has {has}; name {option}"
            )


def _length(view: PromptView, prompt: Prompt, where: str) -> int:
    try:
        return view.measure(prompt)
    except TaskError as error:
        raise TaskError(f"{where}: {error}") from error


def _prompt_column(data: str, rows: Sequence[Row], named: str) -> str:
    if named:
        if not any(all(fits(_at(row, named)) for row in rows) for fits in (_is_prompt, _has_answer)):
            raise ConfigError(
                f"--prompt {named}: a prompt is a text or a list of messages, and not every row of {data} has one "
                f"there{_misfit(rows, named)}; columns are {', '.join(rows[0])}"
            )
        return named
    fitting = [name for name in rows[0] if all(_is_prompt(row.get(name)) for row in rows)]
    answered = [name for name in rows[0] if all(_has_answer(row.get(name)) for row in rows)]
    known = [name for names in (fitting, answered) for usual in PROMPTS for name in names if name.lower() == usual]
    others = [name for name in fitting if name not in ANSWERS]
    misfit = next((text for name in PROMPTS if (text := _misfit(rows, name))), "")
    if known or (len(others) == 1 and not misfit):
        return (known or others)[0]
    raise ConfigError(
        f"{data}: no column is the prompt by its name ({', '.join(PROMPTS)}){misfit}; columns are "
        f"{', '.join(rows[0])}: name the prompt's column with --prompt"
    )


def _answer_column(data: str, rows: Sequence[Row], named: str, prompt: str) -> str:
    if named:
        if gap := next((place for place, row in enumerate(rows, 1) if _at(row, named) is None), 0):
            raise ConfigError(
                f"--answer {named}: not every row of {data} has one, row {gap} has none; columns are "
                f"{', '.join(rows[gap - 1])}"
            )
        return named
    names = [name for usual in ANSWERS for name in (usual, *rows[0]) if name.lower() == usual and name != prompt]
    return next((name for name in names if all(_at(row, name) is not None for row in rows)), "")


def _misfit(rows: Sequence[Row], name: str) -> str:
    """Return why the first unsuitable value at `name` is not a prompt; "" if all values are suitable."""
    values = [(place, _at(row, name)) for place, row in enumerate(rows, 1)]
    if all(value is None for _, value in values):
        return ""
    return next((f"; {name!r} of row {place} {_fault(value)}" for place, value in values if not _is_prompt(value)), "")


def _fault(value: object) -> str:
    match value:
        case [*_, {"role": "assistant"}]:
            return "ends with an assistant's message: the last message of each row must be its answer, or of none"
        case [{"from": _, "value": _}, *_]:
            return 'has turns of "from" and "value": write "role" (user, assistant, system) and "content"'
        case None | "" | []:
            return "is empty: leave such rows out"
        case _:
            return f"is {repr(value)[:QUOTED]}, neither a text nor messages"


def _is_prompt(value: object) -> bool:
    if not isinstance(value, list):
        return isinstance(value, str) and bool(value)
    messages = cast("list[object]", value)
    if not messages or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        return False
    return cast("Mapping[str, object]", messages[-1])["role"] != "assistant"


def _has_answer(value: object) -> bool:
    """Return True if `value` is a list of messages that ends with the assistant's answer."""
    match value:
        case [*_, {"role": str()}, {"role": "assistant", "content": str(text)}]:
            return bool(text)
        case _:
            return False


def _at(row: Row, name: str) -> object:
    value: object = row
    for part in [name] if name in row else name.split("."):
        value = cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None
    return value
