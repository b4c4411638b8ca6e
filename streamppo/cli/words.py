"""The cyclopts app, and the arguments that several commands share."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter, Token
from cyclopts.validators import Number

from streamppo import __version__
from streamppo.errors import ConfigError

app = App(
    name="streamppo",
    help="Asynchronous streaming PPO for language models.",
    version=__version__,
    help_format="plaintext",
    default_parameter=Parameter(negative=(), show_default=False),
)

ConfigFile = Annotated[Path, Parameter(help="A TOML file, such as configs/math.toml.")]
RunFolder = Annotated[Path, Parameter(help="The folder of a run, such as runs/math.")]
RunsFolder = Annotated[Path, Parameter(help="The folder with the folders of runs (default: runs).")]
Override = Annotated[str, Parameter(help="section.field=value, such as learner.lr=3e-4; any number of them.")]
# consume_multiple=1: an option whose values are missing (`--set $CHANGES`) is refused, and not ignored.
Changes = Annotated[
    Sequence[str], Parameter(name="--set", consume_multiple=1, help="section.field=value, one or more.")
]
Versions = Annotated[
    Sequence[int],
    Parameter(
        name="--version",
        consume_multiple=1,
        converter=lambda _, tokens: tuple(int(token.value) for token in tokens),
        validator=Number(gte=0),
        help="The versions that sample, one or more.",
    ),
]
Trust = Annotated[bool, Parameter(help="Agree to run the code that the configuration of this folder names.")]


def _parse_int(_: type[int], tokens: Sequence[Token]) -> int:
    # cyclopts alone would round 1.5.
    return int(tokens[0].value)


def _parse_finite(_: type[float], tokens: Sequence[Token]) -> float:
    # cyclopts alone would accept nan, which passes every bound, and inf.
    number = float(tokens[0].value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is not finite")
    return number


def refuse_together(command: str, given: Mapping[str, bool], reason: str) -> None:
    """Raise `ConfigError` if more than one of the `given` options of `command` is true: they exclude each other."""
    options = [option for option, is_given in given.items() if is_given]
    if len(options) > 1:
        raise ConfigError(f"`streamppo {command}` takes only one of {' and '.join(options)}: {reason}")


Finite = Annotated[float, Parameter(converter=_parse_finite)]
Whole = Annotated[int, Parameter(converter=_parse_int)]
Count = Annotated[int, Parameter(converter=_parse_int, validator=Number(gte=0))]
Positive = Annotated[int, Parameter(converter=_parse_int, validator=Number(gte=1))]
