"""The commands that compute with weights of a run: export, eval, try, replay and bundle."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from streamppo.cli.words import Changes, Count, Positive, RunFolder, Trust, Versions, Whole, app
from streamppo.commands import run_argument
from streamppo.config import file as configfile
from streamppo.errors import ConfigError

Rows = Annotated[Sequence[Whole], Parameter(consume_multiple=1, validator=Number(gte=0))]


@app.command
def export(
    folder: RunFolder,
    /,
    *,
    to: Annotated[Path, Parameter(help="The folder to write; it must not exist.")],
    version: Annotated[Count | None, Parameter(help="The checkpoint (default: the newest).")] = None,
    adapter: Annotated[bool, Parameter(negative=(), help="With model.lora: only the adapters, for peft.")] = False,
) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder, even if the run has died."""
    folder = configfile.existing(folder)
    config = configfile.load(folder / configfile.CONFIG)
    from streamppo.commands.models import weights as command

    return command.export(config, folder, version, to, adapter=adapter)


@app.command(name="eval")
def evaluate(
    model: Annotated[Path, Parameter(name="MODEL", help="The folder of a run, or the folder or hub name of a model.")],
    /,
    *words: Annotated[
        str,
        Parameter(
            name="CONFIG",
            help="A TOML file with a task and reward (required for a model), and overrides section.field=value.",
        ),
    ],
    version: Annotated[Count | None, Parameter(help="The checkpoint of the run (default: the newest).")] = None,
    samples: Annotated[Count, Parameter(help="Samples of each prompt for pass@k (default: 8).")] = 8,
    json: Annotated[bool, Parameter(help="Print the numbers as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Measure held-out accuracy and pass@k of a run's checkpoint, or of a model with the task of CONFIG."""
    run_config, config = run_argument.configuration_of(model, words, version)
    if run_config is not None:
        run_argument.ask(model.resolve(), trust=trust)
    from streamppo.commands.models import eval as command

    return command.evaluate(str(model), run_config, config, version=version, samples=samples, as_json=json)


@app.command(name="try")
def try_versions(
    folder: RunFolder,
    /,
    *,
    versions: Versions,
    prompt: Annotated[str, Parameter(help="The prompt's number, as in `inspect --prompt`, or a text.")],
    at: Annotated[Count, Parameter(help="The token to continue from (default: the first).")] = 0,
    sample: Annotated[Count | None, Parameter(help="The prompt's sample (default: the first in the archive).")] = None,
    attempt: Annotated[Count | None, Parameter(help="The sample's attempt (default: the newest).")] = None,
    n: Annotated[Positive, Parameter(name=("-n", "--n"), help="Continuations (default: 16).")] = 16,
    json: Annotated[bool, Parameter(help="Print the completions as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Sample and score continuations of an archived completion from one of its tokens, with any versions.

    A version without a checkpoint is replayed from the archive. Two versions are compared by their mean rewards.
    """
    from streamppo.commands.trial import TrialQuestion

    question = TrialQuestion(tuple(versions), prompt, at, sample, attempt, n)
    question.refuse()
    folder = run_argument.trusted_folder(folder, trust=trust)
    from streamppo.commands.models import continuations as command

    return command.try_versions(folder, question, as_json=json)


@app.command
def replay(
    place: Annotated[Path, Parameter(name="RUN", help="The folder of a run, or the file of a bundle.")],
    /,
    *,
    to: Annotated[Count | None, Parameter(help="For a run: the last version to replay (default: all).")] = None,
    rows: Annotated[Rows, Parameter(help="For a bundle: rows to show (default: 0, or all as JSON).")] = (),
    changes: Changes = (),
    pdb: Annotated[bool, Parameter(help="For a bundle: start the update in the debugger.")] = False,
    json: Annotated[bool, Parameter(help="For a bundle: print all numbers as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Repeat the updates of a run or the update of a bundle without an engine, and compare the weights.

    With --set, show the effect of another configuration on the same batches. A bundle needs no run and no Ray.
    """
    if place.is_dir() or not os.path.lexists(place):
        if rows or pdb or json:
            raise ConfigError("--rows, --pdb and --json are for the file of a bundle: `streamppo bundle` writes one")
        folder = run_argument.trusted_folder(place, trust=trust)
        from streamppo.commands import replay as replay_run

        return replay_run.replay(folder, to, changes)
    if to is not None:
        raise ConfigError("--to is for the folder of a run: a bundle has one update")
    from streamppo.commands.bundle import replay as replay_bundle

    return replay_bundle.replay(place, rows, changes, trust=trust, debug=pdb, as_json=json)


@app.command
def bundle(
    folder: RunFolder,
    /,
    *,
    update: Annotated[Positive, Parameter(help="The version that the update made.")],
    to: Annotated[Path | None, Parameter(help="The file to write (default: NAME-N.safetensors).")] = None,
    rows: Annotated[Rows, Parameter(help="Rows of the batch (default: all; fewer give another update).")] = (),
    adapter: Annotated[bool, Parameter(help="For a run with model.lora: leave out the frozen weights.")] = False,
    json: Annotated[bool, Parameter(help="Print the result as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Write one update to a file, with batch, configuration and weights: `replay FILE` repeats it without the run."""
    folder = run_argument.trusted_folder(folder, trust=trust)
    from streamppo.commands.bundle import make

    return make.bundle(folder, update, to, rows, adapter=adapter, as_json=json)
