"""The command line. Torch and Ray are imported only after arguments and configuration have been checked.

words.py     the program, and the arguments that several commands share
__init__.py  commands that train: run, resume, fork, scale
look.py      commands that look at a run: from list and watch to inspect and verify
models.py    commands that compute with weights of a run: export, eval, try, replay, bundle
prepare.py   commands before a run: from init and check to plan

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

from streamppo import __version__, process
from streamppo.cli import look as look
from streamppo.cli import models as models
from streamppo.cli import prepare as prepare
from streamppo.cli.words import Changes, ConfigFile, Count, Override, Positive, RunFolder, RunsFolder, Trust, app
from streamppo.commands import run_argument
from streamppo.commands.console import echo, flush, print_error
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import inputs, run_folder, threads
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.errors import ConfigError, RunError, StreamppoError

STARTED = time.perf_counter()
MISTAKE = ConfigError.exit_code
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Error numbers of a failed write to a full disk or a broken device."""

log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. An expected error is printed as one sentence to standard error."""
    try:
        code = _run(arguments)
    finally:
        is_written = flush()
    return code if is_written else code or _fail_to_write()


def _run(arguments: Sequence[str] | None) -> int:
    process.escape_unprintable()
    words = sys.argv[1:] if arguments is None else arguments
    # Otherwise Ray writes a notice about its usage report into the log.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _refuse_deleted_folder()
        command, bound, _ = app.parse_args(words, exit_on_error=False, print_error=False)
        return command(*bound.args, **bound.kwargs) or (0 if words else MISTAKE)
    except CycloptsError as error:
        print_error(str(error))
        return MISTAKE
    except StreamppoError as error:
        print_error(f"{type(error).__name__}: {error}")
        return error.exit_code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BrokenPipeError:
        return 128 + signal.SIGPIPE
    except OSError as error:
        # An error of standard output has no filename, unlike every other OSError.
        if error.errno not in FULL or error.filename is not None:
            raise
        return _fail_to_write()


def _fail_to_write() -> int:
    print_error("standard output cannot be written: its disk is full, or its device fails")
    return RunError.exit_code


def _refuse_deleted_folder() -> None:
    # Without a current folder, relative paths and child processes would fail.
    try:
        Path.cwd()
    except OSError as error:
        raise RunError("the current folder has been deleted: change to another one, and try again") from error


@app.command
def run(
    config: ConfigFile,
    /,
    *overrides: Override,
    dry_run: Annotated[bool, Parameter(help="Print the resolved configuration and stop.")] = False,
    resume: Annotated[bool, Parameter(help="Continue from the last checkpoint of runs/NAME.")] = False,
    runs: RunsFolder = Path("runs"),
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
        return _continue(loaded, folder, f"{config}", accept_changes=False, trust=trust)
    from streamppo.commands.checks import check

    check.refuse(loaded)
    # Catch signals before the next line is printed: a program that reads the line may react with a signal.
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
    copies: Annotated[str, Parameter(name="--from", help="Restore the folder from the copies at this address.")] = "",
    trust: Trust = False,
) -> int:
    """Continue a run with its configuration and overrides."""
    if copies:
        from streamppo.queue.restore import restore

        restore(copies, folder)
    folder = configfile.existing(folder)
    loaded = configfile.load(folder / configfile.CONFIG, overrides)
    process.log_to_stdout()
    return _continue(loaded, folder, ", ".join(overrides), accept_changes=accept_changes, trust=trust)


def _continue(config: Config, folder: Path, source: str, *, accept_changes: bool, trust: bool) -> int:
    """Continue the run in `folder` with `config`. `source` is the file or the overrides that may change it, or "".

    A second driver and a complete run are detected before torch and Ray are imported.
    """
    config = threads.with_recorded(config, folder)
    with run_folder.driver_lock(folder):
        if complete := run_folder.nothing_to_do(config, folder):
            log.info(complete)
            return 0
        changes = run_argument.agree_to_changes(folder, config, trust=trust)
        if source and not changes:
            log.info("%s: the run has this configuration already", source)
        from streamppo.commands.checks import check

        check.refuse(config)
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
    name: Annotated[str, Parameter(help="The name of the new run (default: NAME-at-N).")] = "",
    runs: Annotated[Path, Parameter(help="The folder for the new run's folder (default: runs).")] = Path("runs"),
    json: Annotated[bool, Parameter(help="Print the result as JSON, for programs.")] = False,
    trust: Trust = False,
) -> int:
    """Make a new run that begins with a version of another run. `resume` continues it.

    A version without a checkpoint is replayed from the archive. The original run is not changed.
    """
    folder = run_argument.trusted_folder(folder, trust=trust)
    from streamppo.commands.start import fork as command

    return command.fork(folder, at, changes, name, runs.resolve(), as_json=json)


@app.command
def scale(
    folder: RunFolder,
    /,
    *,
    rollouts: Annotated[Positive, Parameter(help="The number of rollout actors, at least 1.")],
) -> int:
    """Change the number of rollout actors of a run in progress. A resumed run keeps the new number."""
    folder = configfile.existing(folder)
    path = folder / configfile.CONFIG
    before = configfile.load(path).rollout.actors
    # An invalid number is refused here, before the run gets it.
    configfile.load(path, [f"rollout.actors={rollouts}"])
    run_folder.scale(folder, rollouts)
    present = configfile.load(path).rollout.actors
    if present != rollouts:
        raise RunError(f"{folder}: the run has {present} rollout actors, not {rollouts}: its output says why")
    echo(f"{folder}: rollout actors: {present}, before: {before}")
    return 0
