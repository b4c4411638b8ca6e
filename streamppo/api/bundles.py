"""Bundles in Python: write one update of a run to a file, and replay it from there. Each runs in a separate process."""

from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from streamppo.api.parent import answer
from streamppo.config import file as configfile


class BundleReplay(NamedTuple):
    """A replayed update: the digest of its version, the `recorded` one, and reasons why its bits may differ.

    `tokens` has a column for each number (docs/bundle.md), with an entry for each token of each pass of a row.
    """

    digest: str
    recorded: str
    same: bool
    differences: list[str]
    metrics: dict[str, float]
    tokens: dict[str, NDArray[np.generic]]


def bundle(
    folder: str | PathLike[str],
    update: int,
    to: str | PathLike[str] | None = None,
    *,
    rows: Sequence[int] = (),
    adapter: bool = False,
) -> Path:
    """Write the update that made version `update` of the run in `folder` to a file; return it.

    Raises `StreamppoError`, of the kind that the command reports.
    """
    words = ["bundle", str(configfile.existing(Path(folder))), "--update", str(update), "--json"]
    words += ["--to", str(to)] if to is not None else []
    words += ["--rows", *map(str, rows)] if rows else []
    return Path(cast(Mapping[str, str], answer(*words, *["--adapter"] * adapter))["file"])


def replay(file: str | PathLike[str], rows: Sequence[int] = (), changes: Sequence[str] = ()) -> BundleReplay:
    """Replay the update in the bundle `file`, with `changes`; `tokens` are of `rows`, by default of all.

    A number that the update does not compute is NaN. Raises as `bundle` does.
    """
    words = ["replay", str(Path(file)), "--json"]
    words += ["--rows", *map(str, rows)] if rows else []
    words += ["--set", *changes] if changes else []
    told = cast(dict[str, Any], answer(*words))
    names = BundleReplay._fields
    return BundleReplay(**{name: told[name] for name in names[:-1]}, tokens=_arrays(told["tokens"]))


def _arrays(columns: Mapping[str, Sequence[Any]]) -> dict[str, NDArray[np.generic]]:
    """The columns of numbers as float32 or whole numbers; NaN is null in JSON."""
    found: dict[str, NDArray[np.generic]] = {}
    for name, column in columns.items():
        values = [np.nan if value is None else value for value in column]
        found[name] = np.array(values, np.float32 if any(isinstance(value, float) for value in values) else None)
    return found
