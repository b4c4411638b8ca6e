"""The three signatures of a reward, distinguished by their parameters.

    trajectory   score(trajectory: ScoredText, **columns) -> float | Reward
    batched      score(prompts, completions, completion_ids, **columns) -> list[float | None]    TRL's; it has at least
                 one of `completions` and `completion_ids`
    verl         compute_score(data_source, solution_str, ground_truth, extra_info) -> float | dict

Each may be a `def`, an `async def`, a class with `__call__`, or an object with `__call__`, as TRL's factories return.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Set
from functools import partial
from typing import Literal, NamedTuple, TypeAlias

from streamppo.errors import TaskError
from streamppo.tasks import plugins, user_traceback
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards.outcome import Outcome, check, check_batch, check_verl, failure_of
from streamppo.types import Message, ScoredText

Texts: TypeAlias = tuple[ScoredText, ...]
Columns: TypeAlias = tuple[Row, ...]
Style: TypeAlias = Literal["trajectory", "batched", "verl"]
BATCHED = frozenset({"prompts", "completions", "completion_ids"})
BATCH_MARKS = frozenset({"completions", "completion_ids"})
"""Parameters that identify the batched style. `prompts` does not, because a column may have that name."""
TRL_ONLY = {
    "trainer_state": "there is no Trainer here: give it a default",
    "log_extra": "return a Reward with its numbers as components, and give it a default",
    "log_metric": "return a Reward with its numbers as components, and give it a default",
    "environments": "an environment is the table [environment], and gives rewards itself",
}
"""Arguments that only TRL's trainer gives, and what to use instead."""
VERL = frozenset({"data_source", "solution_str", "ground_truth", "extra_info"})


class Signature(NamedTuple):
    """How a reward is called.

    `style_parameters` are the parameters that its style defines. `named_columns` are other parameters, each of which
    gets the column of its name. `required_columns` are the named columns without a default, and the answer if verl's
    `ground_truth` has no default. If `takes_all` (**kwargs), the reward gets every column, except columns with the name
    of a style parameter or of a `bound` argument.
    """

    style: Style
    is_async: bool
    style_parameters: frozenset[str]
    named_columns: frozenset[str]
    required_columns: frozenset[str]
    takes_all: bool
    bound: frozenset[str] = frozenset()

    def columns(self, row: Row) -> dict[str, object]:
        """Select the reward's columns. Raises `TaskError` if a needed one is missing."""
        if not self.required_columns <= row.keys():
            missing, more = self.required_columns - row.keys(), ""
            if "prompt" in missing:
                more += "; the prompt is `trajectory.prompt`, or TRL's `prompts`"
            if "answer" in missing and self.style == "verl":
                more += "; its `ground_truth` is the row's answer: name that column as task.answer"
            if advice := TRL_ONLY.get(min(missing)):
                more += f"; TRL's trainer gives {min(missing)}, and {advice}"
            names = ", ".join(sorted(row)) or "none"
            raise TaskError(f"the reward asks for the column {min(missing)!r}; columns are {names}{more}")
        if self.takes_all:
            return {name: value for name, value in row.items() if name not in self.bound | self.style_parameters}
        return {name: row[name] for name in self.named_columns if name in row}


def detect_signature(reward: object, name: str, arguments: Mapping[str, object]) -> Signature:
    """Return the signature of a function, or of a class's `__call__`. Raises `TaskError` if it is none of the three."""
    function = _callable_of(reward, name)
    if inspect.isclass(reward):
        plugins.check_arguments(reward, arguments, f"reward.function {name!r}")
    parameters = list(plugins.parameters_of(function, f"reward.function {name!r}").values())[inspect.isclass(reward) :]
    # The keywords of a partial are bound, too: columns of the same names do not replace them.
    preset = frozenset(function.keywords) if isinstance(function, partial) else frozenset[str]()
    bound = preset if inspect.isclass(reward) else preset | arguments.keys()
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    is_async = inspect.iscoroutinefunction(function)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    style, style_names = _style(named, name)
    _check_bound(bound - preset, named, style_names, f"reward.function {name!r}", takes_all=takes_all)
    column_parameters = {key: p for key, p in named.items() if key not in style_names and key not in bound}
    required_columns = frozenset(key for key, p in column_parameters.items() if p.default is p.empty)
    # verl passes no columns, so a parameter keeps its default, even if a column has its name.
    named_columns = required_columns if style == "verl" else frozenset(column_parameters)
    if style == "batched" and takes_all:
        style_names = BATCHED
    if style == "verl" and named["ground_truth"].default is inspect.Parameter.empty:
        required_columns |= {"answer"}
    # verl passes no further columns, so its `**kwargs` gets none here either.
    return Signature(
        style, is_async, frozenset(style_names), named_columns, required_columns, takes_all and style != "verl", bound
    )


def _check_bound(
    bound: Iterable[str], named: Iterable[str], style_parameters: Set[str], subject: str, *, takes_all: bool
) -> None:
    """Raise `TaskError` if a `bound` argument is no parameter, or a parameter that gets the scored trajectory."""
    plugins.check_names(bound, set(named) - style_parameters, subject, takes_all=takes_all)
    if conflicts := style_parameters & set(bound):
        raise TaskError(f"{subject}: {min(conflicts)!r} is not an argument: it is the scored trajectory")


def _callable_of(reward: object, name: str) -> Callable[..., object]:
    if callable(reward):
        return reward if inspect.isroutine(reward) or isinstance(reward, partial) else reward.__call__
    raise TaskError(f"reward.function {name!r} is neither a function nor a class but a {type(reward).__name__}")


def _style(named: Mapping[str, inspect.Parameter], name: str) -> tuple[Style, Set[str]]:
    """Return the style, and the parameters that the style defines; all other parameters get columns."""
    if {"solution_str", "ground_truth"} <= named.keys():
        return "verl", VERL & named.keys()
    if BATCH_MARKS & named.keys():
        return "batched", BATCHED & named.keys()
    first = next(iter(named.values()), None)
    if first is not None and (first.name == "trajectory" or first.annotation in (ScoredText, "ScoredText")):
        return "trajectory", {first.name}
    beside = (f"; TRL's trainer gives {key}, and {advice}" for key, advice in TRL_ONLY.items() if key in named)
    raise TaskError(
        f"reward.function {name!r} takes ({', '.join(named)}); it must be one of "
        "score(trajectory, **columns), score(prompts, completions, **columns) and "
        f"compute_score(data_source, solution_str, ground_truth, extra_info){''.join(beside)}"
    )


class LoadedReward(NamedTuple):
    """A loaded reward, which is called with texts and their rows."""

    signature: Signature
    function: Callable[..., object]


def load(name: str, arguments: Mapping[str, object]) -> LoadedReward:
    """Load the reward `name`. A class is constructed with `arguments`; a function gets them with every call.

    Raises `TaskError` for a wrong name, signature or constructor.
    """
    function = plugins.load(name, "reward.function")
    signature = detect_signature(function, name, arguments)
    try:
        reward = (
            function(**arguments) if inspect.isclass(function) else partial(_callable_of(function, name), **arguments)
        )
    except user_traceback.USER_ERRORS as error:
        raise TaskError(f"reward.function {name!r}: {user_traceback.format_user_error(error)}") from error
    assert callable(reward)
    return LoadedReward(signature, reward)


def call(reward: LoadedReward, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
    """Call a sync reward; exceptions become failures."""
    try:
        value = _invoke(reward, texts, columns)
        if inspect.iscoroutine(value):
            value.close()
            reason = "returned a coroutine, but is no `async def`: call it in an `async def` that awaits it"
            return (Outcome(reason=reason),) * len(texts)
        return _outcomes(reward.signature.style, value, texts)
    # Inspecting the returned values may raise too.
    except user_traceback.USER_ERRORS as error:
        return (failure_of(error),) * len(texts)


async def call_async(reward: LoadedReward, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
    """Call an async reward; exceptions become failures, a cancellation of the call is passed on."""
    try:
        value = _invoke(reward, texts, columns)
        assert inspect.isawaitable(value)
        return _outcomes(reward.signature.style, await value, texts)
    # Inspecting the returned values may raise too.
    except user_traceback.USER_ERRORS as error:
        if user_traceback.is_cancellation(error):
            raise
        return (failure_of(error),) * len(texts)


def _invoke(reward: LoadedReward, texts: Texts, columns: Columns) -> object:
    signature, function = reward
    match signature.style:
        case "trajectory":
            return function(texts[0], **signature.columns(columns[0]))
        case "batched":
            return function(
                **_style_arguments(signature, _trl_arguments(texts)),
                **_column_lists([signature.columns(row) for row in columns]),
            )
        case "verl":
            return function(**_style_arguments(signature, _verl(texts[0], columns[0])), **signature.columns(columns[0]))


def _style_arguments(signature: Signature, values: Row) -> dict[str, object]:
    return {name: value for name, value in values.items() if name in signature.style_parameters}


def _column_lists(rows: list[dict[str, object]]) -> dict[str, list[object]]:
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _trl_arguments(texts: Texts) -> dict[str, object]:
    """Return TRL's keyword arguments; for a chat, prompts and completions are lists of messages.

    If a completion continues an assistant's message, that message belongs to the completion, not to the prompt.
    """
    return {
        "prompts": [_chat(text.prompt_messages) if text.messages else text.prompt for text in texts],
        "completions": [_chat(text.completion_messages) if text.messages else text.completion for text in texts],
        "completion_ids": [text.token_ids for text in texts],
    }


def _chat(messages: Iterable[Message]) -> list[dict[str, object]]:
    return [message.plain() for message in messages]


def _verl(text: ScoredText, row: Row) -> dict[str, object]:
    """Return verl's keyword arguments. verl's reward managers add two entries to the row's `extra_info`.

    `num_turns` counts the prompt, the policy's turns and the observations between them.
    """
    turns = 1 + max(1, len(text.turns)) + len(text.observations)
    return {
        "data_source": text.source,
        "solution_str": text.completion,
        "ground_truth": row.get("answer"),
        "extra_info": {**(row.get("extra_info") or {}), "num_turns": turns, "rollout_reward_scores": {}},
    }


def _outcomes(style: Style, value: object, texts: Texts) -> tuple[Outcome, ...]:
    match style:
        case "trajectory":
            return (check(value, texts[0]),)
        case "batched":
            return check_batch(value, texts)
        case "verl":
            return (check_verl(value, texts[0]),)
