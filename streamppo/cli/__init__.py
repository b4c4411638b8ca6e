"""The command line. Torch and Ray are imported only after the arguments and the configuration are checked.

words.py     the program, and the arguments that several commands share
__init__.py  commands that train, and that look at a run
models.py    commands that take its weights: a folder, held-out numbers, completions
prepare.py   commands that prepare a run
updates.py   commands that replay updates

exit code 0     the command succeeded
          1     something failed
          2     a mistake in the arguments or in the configuration
          130   stopped by Ctrl-C; 143 by SIGTERM, 129 by SIGHUP (128 and the number of the signal)
"""

import errno
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import CycloptsError, Parameter
from cyclopts.validators import Number

from streamppo import __version__, process
from streamppo.cli import models as models
from streamppo.cli import prepare as prepare
from streamppo.cli import updates as updates
from streamppo.cli.words import Changes, ConfigFile, Count, Override, Positive, RunFolder, Trust, Whole, app
from streamppo.commands import run_argument
from streamppo.commands import scale as rollouts_of_run
from streamppo.commands.console import complain, echo, flush
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import inputs, run_folder, threads
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.errors import ConfigError, RunError, StreamppoError

STARTED = time.perf_counter()
MISTAKE = ConfigError.exit_code
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to a full disk or a failing device."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Expected errors print one sentence to standard error."""
    try:
        code = _run(arguments)
    finally:
        is_written = flush()
    return code if is_written else code or _fail_to_write()


def _run(arguments: Sequence[str] | None) -> int:
    process.take_any_text()
    words = sys.argv[1:] if arguments is None else arguments
    # Keeps Ray's usage report out of the training log.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _refuse_deleted_folder()
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or (0 if words else MISTAKE)
    except CycloptsError as error:
        complain(str(error))
        return MISTAKE
    except StreamppoError as error:
        complain(f"{type(error).__name__}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OSError as error:
        # An error of a file names it; those of standard output do not.
        if error.errno not in FULL or error.filename is not None:
            raise
        return _fail_to_write()


def _fail_to_write() -> int:
    complain("standard output cannot be written: its disk is full, or its device fails")
    return RunError.exit_code


def _refuse_deleted_folder() -> None:
    """Raise `RunError` if the current folder has been deleted: relative paths and child processes would fail."""
    try:
        Path.cwd()
    except OSError as error:
        raise RunError("the current folder has been deleted: change to another one, and try again") from error


# --- training ------------------------------------------------------------------------------------------------


@app.command
def run(
    config: ConfigFile,
    /,
    *overrides: Override,
    dry_run: Annotated[bool, Parameter(help="Print the resolved configuration and stop.")] = False,
    resume: Annotated[bool, Parameter(help="Continue from the last checkpoint of runs/NAME.")] = False,
    runs: Annotated[Path, Parameter(help="Where run folders are made (default: runs).")] = Path("runs"),
    trust: Trust = False,
) -> int:
    """Train with the configuration CONFIG and overrides."""
    loaded = configfile.load(config, overrides)
    if dry_run:
        echo(*configfile.show(loaded).split("\n"))
        return 0
    process.log_to_stdout()
    if resume:
        folder = configfile.existing(runs / loaded.name)
        loaded = inputs.with_clock(loaded, folder)
        return _go_on(loaded, folder, f"{config}", accept_changes=False, trust=trust)
    run_argument.refuse(loaded)
    # First: whoever has read the line below may send a signal.
    interrupts = Interrupts()
    log.info(f"streamppo {__version__}: {config}, {loaded.updates} updates; starting Ray")
    from streamppo import loop

    folder = loop.new_folder(loaded, runs.resolve())
    with run_folder.driver_lock(folder):
        return loop.run(loaded, folder, started=STARTED, interrupts=interrupts)


@app.command
def resume(
    folder: RunFolder,
    /,
    *overrides: Override,
    accept_changes: Annotated[bool, Parameter(help="Continue although data or model have changed.")] = False,
    copies: Annotated[str, Parameter(name="--from", help="Make the folder of the copies at this address.")] = "",
    trust: Trust = False,
) -> int:
    """Continue a run with its configuration and overrides."""
    if copies:
        from streamppo.queue.restore import restore

        restore(copies, folder)
    folder = configfile.existing(folder)
    loaded = configfile.load(folder / configfile.CONFIG, overrides)
    process.log_to_stdout()
    return _go_on(loaded, folder, ", ".join(overrides), accept_changes=accept_changes, trust=trust)


def _go_on(config: Config, folder: Path, by: str, *, accept_changes: bool, trust: bool = False) -> int:
    """Continue the run in `folder` with `config`; log the changes made `by` a file or overrides ("" for none).

    The checks for another driver and for a complete run come before torch and Ray are imported.
    """
    config = threads.with_recorded(config, folder)
    with run_folder.driver_lock(folder):
        if complete := run_folder.nothing_to_do(config, folder):
            log.info(complete)
            return 0
        changes = run_argument.changes(folder, config)
        run_argument.ask(folder, config, trust=trust)
        consent.give(folder, config)
        for line in changes:
            log.info(line)
        if by and not changes:
            log.info("%s: the run has this configuration already", by)
        run_argument.refuse(config)
        interrupts = Interrupts()
        from streamppo import loop

        return loop.run(config, folder, started=STARTED, interrupts=interrupts, accept_changes=accept_changes)


@app.command
def fork(
    folder: RunFolder,
    /,
    *,
    at: Annotated[Count, Parameter(help="The version from which the new run begins.")],
    changes: Changes = (),
    name: Annotated[str, Parameter(help="Its name (default: NAME-at-N).")] = "",
    runs: Annotated[Path, Parameter(help="Where its folder is made (default: runs).")] = Path("runs"),
    json: Annotated[bool, Parameter(help="Print the result as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Make a new run that begins with a version of another run: `resume` trains it.

    A version without a checkpoint is replayed from the archive. The run itself is not changed.
    """
    folder = configfile.existing(folder)
    run_argument.ask(folder, trust=trust)
    from streamppo.commands.start import fork as command

    return command.fork(folder, at, changes, name, runs.resolve(), as_json=json)


@app.command
def scale(
    folder: RunFolder,
    /,
    *,
    rollouts: Annotated[Positive, Parameter(help="How many rollout actors, at least 1.")],
) -> int:
    """Change the number of rollout actors of a running run. A resumed run keeps the number."""
    return rollouts_of_run.scale(configfile.existing(folder), rollouts)


# --- looking at a run ----------------------------------------------------------------------------------------


@app.command
def bisect(
    folder: RunFolder,
    /,
    *,
    metric: Annotated[str, Parameter(help="A metric of its updates, or `accuracy` of its evaluations.")] = "",
    above: Annotated[float | None, Parameter(help="It holds where the metric is above this.")] = None,
    below: Annotated[float | None, Parameter(help="It holds where the metric is below this.")] = None,
    test: Annotated[
        Path | None, Parameter(help="FILE.py with a function `test` that returns True where the condition holds.")
    ] = None,
    changes: Changes = (),
    json: Annotated[bool, Parameter(help="Print the answer as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Find the first version at which a condition holds: a bound of a metric, or a test of yours.

    With --set: the first one of the same batches under another configuration.
    """
    from streamppo.commands.bisection import Question
    from streamppo.commands.look import bisect

    question = Question(metric, above, below, test, tuple(changes))
    question.refuse()
    folder = configfile.existing(folder)
    run_argument.ask(folder, trust=trust)
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
    """Compare the records of a run with each other, and replay some updates. Prints a digest of the whole run."""
    folder = configfile.existing(folder)
    run_argument.ask(folder, trust=trust)
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
    n: Annotated[Positive, Parameter(help="Trajectories to show (default: 4).")] = 4,
) -> int:
    """Show text, tokens, rewards, versions and lag of the trajectories that a run was trained on."""
    folder = configfile.existing(folder)
    if time:
        from streamppo.commands.look import views

        return views.time_table(folder)
    config = configfile.load(folder / configfile.CONFIG)
    from streamppo.commands.look import inspect as command

    if dead_letters:
        return command.inspect_dead_letters(folder, n)
    if prompt is not None:
        return command.inspect_prompt(folder, prompt)
    return command.inspect(config, folder, update, n)


@app.command
def report(
    *found: Annotated[
        Path, Parameter(name="RUN", help="Folders of runs; files of `replay --set` too (RUN/replays/1.json).")
    ],
    to: Annotated[
        Path | None, Parameter(help="The file to write (default: report.html in the run's folder; of several, here).")
    ] = None,
    json: Annotated[
        bool, Parameter(help="Print the differences of runs with a common past as JSON, without a page.")
    ] = False,
    measured: Annotated[
        Sequence[Path],
        Parameter(consume_multiple=True, help="Runs whose costs predict what the page's runs do, as `plan` does."),
    ] = (),
) -> int:
    """Write a page that opens offline: curves, timeline, tokens, samples, diagnosis. Several runs are compared.

    A run and its fork are compared prompt by prompt, from the version at which they part.
    """
    chosen = run_argument.runs_and_replays("report", found)
    from streamppo.commands.look import views as command

    return command.report(chosen, to, measured, as_json=json)


@app.command
def summary(
    folder: RunFolder,
    /,
    *,
    json: Annotated[bool, Parameter(help="Print summary.json, or its known part, for programs.")] = False,
) -> int:
    """Show a run on one screen: its progress, accuracy and warnings."""
    folder = configfile.existing(folder)
    from streamppo.commands.look import summary as command

    return command.summary(folder, as_json=json)


@app.command
def watch(
    *found: Annotated[
        Path, Parameter(name="RUN", help="The folder of a run; then runs, or RUN/replays/1.json, to compare it with.")
    ],
    host: Annotated[str, Parameter(help="The address to listen on; any but loopback needs a token.")] = "127.0.0.1",
    port: Annotated[
        Whole | None, Parameter(validator=Number(gte=0, lte=65535), help="The port (default: 8484, if it is free).")
    ] = None,
) -> int:
    """Show a run on a live page in the browser: curves, pipeline, trajectories token by token, failures."""
    chosen = run_argument.runs_and_replays("watch", found)
    from streamppo.commands.look import watch as command

    return command.watch(chosen[0], chosen[1:], host, port)


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
def list_runs(
    *,
    runs: Annotated[Path, Parameter(help="Where run folders are made (default: runs).")] = Path("runs"),
) -> int:
    """List all runs: state, updates, reward, held-out accuracy, and the time of the last activity."""
    from streamppo.commands.look import summary as command

    return command.list_runs(runs)
