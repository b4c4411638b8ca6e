"""Calls a reward by its signature: the style of its parameters (styles.py), and the columns that it gets."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import NamedTuple, TypeAlias

from streamppo.errors import TaskError
from streamppo.tasks import plugins, user_traceback
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards.outcome import Outcome, check_batch, check_scored, failure_of
from streamppo.tasks.rewards.styles import FOREIGN, STYLES, TRAJECTORY, Style
from streamppo.types import ScoredText

Texts: TypeAlias = tuple[ScoredText, ...]
Columns: TypeAlias = tuple[Row, ...]
SIGNATURES = (
    "score(trajectory, **columns), score(prompts, completions, **columns), compute_score(data_source, solution_str, "
    "ground_truth, extra_info) and those of OpenRLHF, AReaL and verifiers"
)
"""The signatures that an error message lists."""


class Signature(NamedTuple):
    """How a reward is called.

    `style_parameters` are the parameters that its style defines. `named_columns` are the other parameters; each gets
    the column of its name. `required_columns` are the named columns without a default, and the answer if the style's
    parameter for it has no default. If `takes_all` (**kwargs), the reward gets every column, except columns with the
    name of a style parameter or of a `bound` argument.
    """

    style: Style
    is_async: bool
    style_parameters: frozenset[str]
    named_columns: frozenset[str]
    required_columns: frozenset[str]
    takes_all: bool
    bound: frozenset[str] = frozenset()

    def columns(self, row: Row) -> dict[str, object]:
        """Select the reward's columns in `row`. Raises `TaskError` if a required column is missing."""
        if not self.required_columns <= row.keys():
            missing, more = self.required_columns - row.keys(), ""
            if "prompt" in missing:
                more += "; the prompt is `trajectory.prompt`, or TRL's `prompts`"
            if "answer" in missing and self.style.answer:
                more += f"; its `{self.style.answer}` is the row's answer: name that column as task.answer"
            if self.style is not TRAJECTORY and min(missing) in FOREIGN:
                more += f"; {FOREIGN[min(missing)].format(min(missing))}"
            if not more and "answer" not in missing:
                more = f'; a column is given another name by task.columns = {{ {min(missing)} = "COLUMN" }}'
            names = ", ".join(sorted(row)) or "none"
            raise TaskError(f"the reward asks for the column {min(missing)!r}; columns are {names}{more}")
        if self.takes_all:
            return {name: value for name, value in row.items() if name not in self.bound | self.style_parameters}
        return {name: row[name] for name in self.named_columns if name in row}


def detect_signature(reward: object, name: str, arguments: Mapping[str, object]) -> Signature:
    """Return the signature of a function, or of a class's `__call__`. Raises `TaskError` for an unknown style."""
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
    style, style_names = _style(parameters, name)
    plugins.check_names(bound - preset, named.keys() - style_names, f"reward.function {name!r}", takes_all=takes_all)
    _check_kinds(style, parameters, name)
    if conflicts := style_names & (bound - preset):
        raise TaskError(f"reward.function {name!r}: {min(conflicts)!r} is not an argument: it is the scored trajectory")
    column_parameters = {key: p for key, p in named.items() if key not in style_names and key not in bound}
    required_columns = frozenset(key for key, p in column_parameters.items() if p.default is p.empty)
    # Trainers that pass no columns leave a parameter at its default, even if a column has its name.
    named_columns = frozenset(column_parameters) if style.takes_columns else required_columns
    if takes_all and style.takes_columns:
        style_names |= style.parameters.keys()
    if style.answer in named and named[style.answer].default is inspect.Parameter.empty:
        required_columns |= {"answer"}
    return Signature(
        style,
        is_async,
        frozenset(style_names),
        named_columns,
        required_columns,
        takes_all and style.takes_columns,
        bound,
    )


def _check_kinds(style: Style, parameters: Sequence[inspect.Parameter], name: str) -> None:
    """Raise `TaskError` for a parameter that `_invoke` cannot fill: it passes all but the trajectory as keywords."""
    by_position = parameters[:1] if style is TRAJECTORY else []
    if by_position and by_position[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise TaskError(f"reward.function {name!r}: {by_position[0].name!r} gets no keyword: put it before the `*`")
    if others := [p.name for p in parameters[len(by_position) :] if p.kind is p.POSITIONAL_ONLY]:
        raise TaskError(f"reward.function {name!r}: {others[0]!r} is passed as a keyword: put the `/` before it")


def _callable_of(reward: object, name: str) -> Callable[..., object]:
    if inspect.isclass(reward) and not any("__call__" in vars(base) for base in reward.__mro__):
        raise TaskError(f"reward.function {name!r} is a class without `__call__`: its instances cannot be called")
    if callable(reward):
        return reward if inspect.isroutine(reward) or isinstance(reward, partial) else reward.__call__
    raise TaskError(f"reward.function {name!r} is neither a function nor a class but a {type(reward).__name__}")


def _style(parameters: Iterable[inspect.Parameter], name: str) -> tuple[Style, Set[str]]:
    named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    first = next(iter(named.values()), None)
    if first is not None and (first.name == "trajectory" or first.annotation in (ScoredText, "ScoredText")):
        return TRAJECTORY, {first.name}
    for style in STYLES:
        if any(mark <= named.keys() for mark in style.marks):
            return style, style.parameters.keys() & named.keys()
    advice = "".join(f"; {FOREIGN[key].format(key)}" for key in named if key in FOREIGN)
    if not named:
        advice = "; if a decorator hides its parameters, write the decorator with functools.wraps"
    taken = ", ".join(str(p.replace(annotation=p.empty, default=p.empty)) for p in parameters)
    raise TaskError(f"reward.function {name!r} takes ({taken}); it must be one of {SIGNATURES}{advice}")


class LoadedReward(NamedTuple):
    """A loaded reward, which is called with texts and their rows."""

    signature: Signature
    function: Callable[..., object]


def load(name: str, arguments: Mapping[str, object]) -> LoadedReward:
    """Load a reward: construct a class with `arguments`, or bind the arguments to a function. Raises `TaskError`."""
    function = plugins.load(name, "reward.function")
    signature = detect_signature(function, name, arguments)
    if not inspect.isclass(function):
        return LoadedReward(signature, partial(_callable_of(function, name), **arguments))
    reward = plugins.call(f"reward.function {name!r}", partial(function, **arguments))
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
    except BaseException as error:
        if not user_traceback.is_of_user(error):
            raise
        return (failure_of(error),) * len(texts)


async def call_async(reward: LoadedReward, texts: Texts, columns: Columns) -> tuple[Outcome, ...]:
    """Call an async reward; exceptions become failures, a cancellation of the call is passed on."""
    try:
        value = _invoke(reward, texts, columns)
        assert inspect.isawaitable(value)
        return _outcomes(reward.signature.style, await value, texts)
    # Inspecting the returned values may raise too.
    except BaseException as error:
        if not user_traceback.is_of_user(error):
            raise
        return (failure_of(error),) * len(texts)


def _invoke(reward: LoadedReward, texts: Texts, columns: Columns) -> object:
    signature, function = reward
    selected = [signature.columns(row) for row in columns]
    if signature.style is TRAJECTORY:
        return function(texts[0], **selected[0])
    arguments = signature.style.arguments(signature.style_parameters, texts, columns)
    if not signature.style.is_batched:
        return function(**arguments, **selected[0])
    names = dict.fromkeys(name for row in selected for name in row)
    return function(**arguments, **{name: [row.get(name) for row in selected] for name in names})


def _outcomes(style: Style, value: object, texts: Texts) -> tuple[Outcome, ...]:
    return check_batch(value, texts) if style.is_batched else (check_scored(value, texts[0]),)
