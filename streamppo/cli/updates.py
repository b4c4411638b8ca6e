"""Commands that replay updates: those of a run's folder, or a single one in a file."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from streamppo.cli.words import Changes, Count, Positive, RunFolder, Trust, Whole, app
from streamppo.commands import run_argument
from streamppo.config import file as configfile
from streamppo.errors import ConfigError

Rows = Annotated[Sequence[Whole], Parameter(consume_multiple=True, validator=Number(gte=0))]


@app.command
def replay(
    place: Annotated[Path, Parameter(name="RUN", help="The folder of a run, or the file of a bundle.")],
    /,
    *,
    to: Annotated[Count | None, Parameter(help="For a run: the last version to replay (default: all).")] = None,
    rows: Annotated[Rows, Parameter(help="For a bundle: rows to show (default: 0; as JSON all).")] = (),
    changes: Changes = (),
    pdb: Annotated[bool, Parameter(help="For a bundle: stop in the debugger at the start of its update.")] = False,
    json: Annotated[bool, Parameter(help="For a bundle: print every number of its tokens, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Redo a run's updates from its archive, without any engine, and compare the weights; or the one of a bundle.

    With --set: show the effect of another configuration on the same batches. A bundle needs no run and no Ray.
    """
    if place.is_dir() or not os.path.lexists(place):
        if rows or pdb or json:
            raise ConfigError("--rows, --pdb and --json are for the file of a bundle: `streamppo bundle` writes one")
        folder = configfile.existing(place)
        run_argument.ask(folder, trust=trust)
        from streamppo.commands import replay as of_run

        return of_run.replay(folder, to, changes)
    if to is not None:
        raise ConfigError("--to is for the folder of a run: a bundle has one update")
    from streamppo.commands.bundle import replay as of_bundle

    return of_bundle.replay(place, rows, changes, trust=trust, debug=pdb, as_json=json)


@app.command
def bundle(
    folder: RunFolder,
    /,
    *,
    update: Annotated[Positive, Parameter(help="The version that the update made.")],
    to: Annotated[Path | None, Parameter(help="The file to write (default: NAME-N.safetensors).")] = None,
    rows: Annotated[Rows, Parameter(help="Rows of its batch (default: all; fewer make another update).")] = (),
    adapter: Annotated[bool, Parameter(help="For a run with model.lora: without the frozen weights.")] = False,
    json: Annotated[bool, Parameter(help="Print the result as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Write one update to a file: batch, configuration, weights and optimizer. `replay FILE` replays it without the
    run."""
    folder = configfile.existing(folder)
    run_argument.ask(folder, trust=trust)
    from streamppo.commands.bundle import make

    return make.bundle(folder, update, to, rows, adapter=adapter, as_json=json)
