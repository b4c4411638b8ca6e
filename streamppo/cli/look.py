"""The commands that look at a run: bisect, verify, inspect, report, summary, watch, trace and list."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from streamppo.cli.words import (
    Changes,
    Count,
    Finite,
    Positive,
    RunFolder,
    RunsFolder,
    Trust,
    Whole,
    app,
    refuse_together,
)
from streamppo.commands import run_argument
from streamppo.config import file as configfile

INSPECTED = 4
"""Number of trajectories that `inspect` shows by default."""


@app.command
def bisect(
    folder: RunFolder,
    /,
    *,
    metric: Annotated[str, Parameter(help="A metric of its updates, or `accuracy` of its evaluations.")] = "",
    above: Annotated[Finite | None, Parameter(help="The condition: the metric is above this.")] = None,
    below: Annotated[Finite | None, Parameter(help="The condition: the metric is below this.")] = None,
    test: Annotated[
        Path | None, Parameter(help="FILE.py with a function `test`, which returns True if the condition holds.")
    ] = None,
    changes: Changes = (),
    json: Annotated[bool, Parameter(help="Print the answer as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Find the first version at which a metric is above or below a bound, or at which your test returns True.

    With --set, the versions are replayed under another configuration, on the same batches.
    """
    from streamppo.commands.bisection import Question
    from streamppo.commands.look import bisect

    question = Question(metric, above, below, test, tuple(changes))
    question.refuse()
    folder = run_argument.trusted_folder(folder, trust=trust)
    return bisect.bisect(folder, question, as_json=json)


@app.command
def verify(
    folder: RunFolder,
    /,
    *,
    updates: Annotated[Count, Parameter(help="Updates to replay, drawn at random (default: 1).")] = 1,
    expect: Annotated[str, Parameter(help="A published digest that the run must match.")] = "",
    json: Annotated[bool, Parameter(help="Print the result as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Compare the records of a run with each other, and replay some updates. Prints a digest of the run."""
    folder = run_argument.trusted_folder(folder, trust=trust)
    from streamppo.commands.look import verify as command

    return command.verify(folder, updates, expect, as_json=json)


@app.command
def inspect(
    folder: RunFolder,
    /,
    *,
    update: Annotated[Positive | None, Parameter(help="The version that the batch made (default: the newest).")] = None,
    dead_letters: Annotated[bool, Parameter(help="Show trajectories that cannot be trained on, with reasons.")] = False,
    prompt: Annotated[Count | None, Parameter(help="Show the outcome of every attempt at this prompt.")] = None,
    time: Annotated[bool, Parameter(help="Show the time of an update by phase and process.")] = False,
    n: Annotated[Positive | None, Parameter(help="Trajectories to show (default: 4).")] = None,
) -> int:
    """Show text, tokens, rewards, versions and lag of the trajectories that a run was trained on."""
    views = {"--time": time, "--prompt": prompt is not None, "--dead-letters": dead_letters}
    refuse_together("inspect", {**views, "--update": update is not None}, "each shows something else")
    refuse_together("inspect", {"--time": time, "--prompt": prompt is not None, "--n": n is not None}, "they show all")
    folder = configfile.existing(folder)
    if time:
        from streamppo.commands.look import views

        return views.time_table(folder)
    config = configfile.load(folder / configfile.CONFIG)
    from streamppo.commands.look import inspect as command

    if dead_letters:
        return command.inspect_dead_letters(folder, n or INSPECTED)
    if prompt is not None:
        return command.inspect_prompt(folder, prompt)
    return command.inspect(config, folder, update, n or INSPECTED)


@app.command
def report(
    *paths: Annotated[
        Path, Parameter(name="RUN", help="Folders of runs, or files of `replay --set` (RUN/replays/1.json).")
    ],
    to: Annotated[
        Path | None, Parameter(help="The file to write (default: report.html, in the folder of a single run or here).")
    ] = None,
    json: Annotated[
        bool, Parameter(help="Print the differences of runs with a common past as JSON, without a page.")
    ] = False,
    measured: Annotated[
        Sequence[Path],
        Parameter(consume_multiple=1, help="Runs from whose costs the page predicts its runs, as `plan` does."),
    ] = (),
) -> int:
    """Write a page that opens offline: curves, timeline, tokens, samples, diagnosis. Several runs are compared.

    A run and its fork are compared prompt by prompt, from the version at which the fork begins.
    """
    folders = run_argument.runs_and_replays("report", paths)
    from streamppo.commands.look import views as command

    return command.report(folders, to, measured, as_json=json)


@app.command
def summary(
    folder: RunFolder,
    /,
    *,
    json: Annotated[bool, Parameter(help="Print summary.json, or its part so far, for programs.")] = False,
) -> int:
    """Show a run on one screen: its progress, accuracy and warnings."""
    folder = configfile.existing(folder)
    from streamppo.commands.look import summary as command

    return command.summary(folder, as_json=json)


@app.command
def watch(
    *paths: Annotated[
        Path, Parameter(name="RUN", help="The folder of a run, then runs or files RUN/replays/1.json for comparison.")
    ],
    host: Annotated[str, Parameter(help="The address to listen on. All except loopback need a token.")] = "127.0.0.1",
    port: Annotated[
        Whole | None, Parameter(validator=Number(gte=0, lte=65535), help="The port (default: 8484, if it is free).")
    ] = None,
) -> int:
    """Show a run on a live page in the browser: curves, pipeline, trajectories token by token, failures."""
    folder, *others = run_argument.runs_and_replays("watch", paths)
    from streamppo.commands.look.watching import server as command

    return command.watch(folder, others, host, port)


@app.command
def trace(
    folder: RunFolder,
    /,
    *,
    to: Annotated[Path, Parameter(help="The file to write (default: trace.json).")] = Path("trace.json"),
) -> int:
    """Write a file for Perfetto: updates, waits, pushes and restarts over time, with queue, engines and phases."""
    folder = configfile.existing(folder)
    from streamppo.commands.look import views as command

    return command.trace(folder, to)


@app.command(name="list")
def list_runs(*, runs: RunsFolder = Path("runs")) -> int:
    """List all runs: state, updates, reward, held-out accuracy, and the time of the last activity."""
    from streamppo.commands.look import summary as command

    return command.list_runs(runs)
