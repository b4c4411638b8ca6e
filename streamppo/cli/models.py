"""The commands that take the weights of a run: as a folder, for held-out numbers, and for completions."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from streamppo.cli.words import Count, Positive, RunFolder, Trust, Versions, app
from streamppo.commands import run_argument
from streamppo.config import file as configfile


@app.command
def export(
    folder: RunFolder,
    /,
    *,
    to: Annotated[Path, Parameter(help="The folder to write; it must not exist.")],
    version: Annotated[Count | None, Parameter(help="The checkpoint (default: the newest).")] = None,
    adapter: Annotated[bool, Parameter(negative=(), help="With model.lora: only the adapters, for peft.")] = False,
) -> int:
    """Write the weights of a checkpoint as a Hugging Face folder; also works for a run that died."""
    folder = configfile.existing(folder)
    config = configfile.load(folder / configfile.CONFIG)
    from streamppo.commands.models import export as command

    return command.export(config, folder, version, to, adapter=adapter)


@app.command(name="eval")
def evaluate(
    model: Annotated[Path, Parameter(name="MODEL", help="The folder of a run, or the folder or hub name of a model.")],
    /,
    *words: Annotated[
        str,
        Parameter(
            name="CONFIG",
            help="A TOML file with another task and reward, which a model needs; and overrides, section.field=value.",
        ),
    ],
    version: Annotated[Count | None, Parameter(help="The checkpoint of the run (default: the newest).")] = None,
    samples: Annotated[Count, Parameter(help="Samples of each prompt for pass@k (default: 8).")] = 8,
    json: Annotated[bool, Parameter(help="Print the numbers as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Measure held-out accuracy and pass@k of a run's checkpoint, with the run's reward, or of a model."""
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
    prompt: Annotated[str, Parameter(help="The prompt's number, as in `inspect --prompt`; or a text.")],
    at: Annotated[Count, Parameter(help="The token to continue from (default: the first).")] = 0,
    sample: Annotated[Count | None, Parameter(help="The prompt's sample (default: the first in the archive).")] = None,
    attempt: Annotated[Count | None, Parameter(help="The sample's attempt (default: the newest).")] = None,
    n: Annotated[Positive, Parameter(name=("-n", "--n"), help="Continuations (default: 16).")] = 16,
    json: Annotated[bool, Parameter(help="Print the completions as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Continue an archived completion from any of its tokens, with the weights of any version, and score it.

    A version without a checkpoint is replayed from the archive. For two versions, prints the difference with its error.
    """
    from streamppo.commands.trial import TrialQuestion

    question = TrialQuestion(tuple(versions), prompt, at, sample, attempt, n)
    question.refuse()
    folder = configfile.existing(folder)
    run_argument.ask(folder, trust=trust)
    from streamppo.commands.models import continuations as command

    return command.try_versions(folder, question, as_json=json)
