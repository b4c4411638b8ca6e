"""`streamppo scale`: changes the number of rollout actors of a running run."""

from pathlib import Path

from streamppo.commands.console import echo
from streamppo.config import file as configfile
from streamppo.driver import run_folder
from streamppo.errors import RunError


def scale(folder: Path, rollouts: int) -> int:
    """Ask the run in `folder` for `rollouts` rollout actors, and print its new number.

    The exit code is 0. Raises `ConfigError` for a number that the configuration does not allow, and `RunError` if the
    run is not running, does not answer or refuses.
    """
    path = folder / configfile.CONFIG
    before = configfile.load(path).rollout.actors
    # An invalid number never reaches the run.
    configfile.load(path, [f"rollout.actors={rollouts}"])
    run_folder.scale(folder, rollouts)
    present = configfile.load(path).rollout.actors
    if present != rollouts:
        raise RunError(f"{folder}: the run has {present} rollout actors, not {rollouts}: its output says why")
    echo(f"{folder}: rollout actors: {present}, before: {before}")
    return 0
