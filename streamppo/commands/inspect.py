"""What an update was trained on, what could not be trained on, and what became of a prompt, for people."""

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from streamppo.commands.echo import echo
from streamppo.config.sections import Config, model_path
from streamppo.errors import JournalError
from streamppo.queue import archive
from streamppo.queue.journal import Journal
from streamppo.queue.records import SavedSlot
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Batch, Floats, Ints, Trajectory, flags, floats, ints


def inspect(config: Config, run: Path, update: int | None, count: int) -> int:
    """Print `count` trajectories of the batch that made version `update`, by default the newest."""
    found = archive.open(run)
    versions = found.versions()
    if not versions:
        raise JournalError(f"{run}: no update was archived yet")
    version = versions[-1] if update is None else update - 1
    batch, columns = found.batch(version), found.columns(version)
    tokenizer = Tokenizer(model_path(config, run))
    rewards = [row.reward for row in batch.trajectories]
    echo(
        f"update {batch.version} -> {batch.version + 1}: {len(rewards)} trajectories, mean reward "
        f"{sum(rewards) / len(rewards):.4g}, tokens of versions below {batch.min_version} are too old"
    )
    ends = columns["offsets"][1:].tolist()
    for row, end in zip(batch.trajectories[:count], ends, strict=False):
        values = columns["values"][end - row.num_tokens : end] if "values" in columns else None
        echo("\n".join(_lines(batch, row, values, tokenizer)))
    return 0


def inspect_dead_letters(run: Path, count: int) -> int:
    """Print the newest `count` trajectories that arrived and could not be trained on."""
    journal = Journal.of(run)
    letters = journal.dead_letters()
    journal.close()
    echo(f"{len(letters)} dead letters")
    for letter in reversed(letters[-count:] if count else []):
        row = letter.trajectory
        # Their columns may not even be whole numbers of entries.
        tokens = ints(row.tokens[: len(row.tokens) // 4 * 4]).tolist()
        echo(f"\n{_title(row)}: {letter.reason}\n  tokens      {' '.join(map(str, tokens))}")
    return 0


def inspect_prompt(run: Path, prompt: int) -> int:
    """Print what became of every attempt at a prompt. Raises `JournalError` for one that was never issued."""
    journal = Journal.of(run)
    saved, ended = journal.read(), journal.ended()
    journal.close()
    attempts = {one.identity: f"{one.state.replace('_', ' ')}: {one.reason}" for one in ended}
    if saved is not None:
        leases = {number: lease.version for lease in saved.leases for number in lease.slots}
        attempts |= {slot.identity: _waits(slot, leases.get(slot.number)) for slot in saved.slots}
    # The archive comes last: what a run that goes on consumes meanwhile is in both.
    found = archive.open(run)
    for version in found.versions():
        if prompt in found.columns(version)["prompt"]:
            attempts |= {
                row.identity: f"trained on by update {version + 1}: reward {row.reward:g}, {row.num_tokens} tokens"
                for row in found.batch(version).trajectories
            }
    mine = sorted((identity, text) for identity, text in attempts.items() if identity.prompt == prompt)
    if not mine:
        raise JournalError(f"{run}: prompt {prompt} was never issued")
    echo(f"{mine[0][0].task} prompt {prompt}")
    for identity, text in mine:
        echo(f"  sample {identity.sample} attempt {identity.attempt}: {text}")
    return 0


def _waits(slot: SavedSlot, leased: int | None) -> str:
    if leased is not None:
        return f"leased to update {leased + 1}"
    return {"open": "to be sampled", "issued": f"issued to {slot.actor}", "ready": "ready"}[slot.state]


def _title(row: Trajectory) -> str:
    identity = row.identity
    return (
        f"{identity.task} prompt {identity.prompt} sample {identity.sample} attempt {identity.attempt}, by {row.actor}"
    )


def _lines(batch: Batch, row: Trajectory, values: Floats | None, tokenizer: Tokenizer) -> Iterator[str]:
    versions = ints(row.versions)
    components = "".join(f", {name} {value:g}" for name, value in row.components.items())
    yield f"\n{_title(row)}: reward {row.reward:g}{components}, {row.finish}, {row.num_tokens} tokens"
    yield f"  prompt      {tokenizer.decode(ints(row.prompt_tokens))!r}"
    yield f"  completion  {tokenizer.decode(ints(row.tokens))!r}"
    yield f"  tokens      {' '.join(map(str, ints(row.tokens).tolist()))}"
    yield f"  log-probs   {_numbers(floats(row.logprobs))}"
    if values is not None:
        yield f"  values      {_numbers(values)}"
    if row.token_rewards:
        yield f"  rewards     {_numbers(floats(row.token_rewards))}"
    yield f"  versions    {_runs(versions)}; oldest token {batch.version - row.oldest_version} versions old"
    if not flags(row.mask).all():
        yield f"  not sampled by the policy: {int((~flags(row.mask)).sum())} tokens"


def _numbers(column: Floats) -> str:
    return " ".join(f"{value:.3f}" for value in column.tolist())


def _runs(versions: Ints) -> str:
    """[3, 3, 4] -> "2 x 3, 1 x 4"."""
    return ", ".join(f"{len(list(same))} x {version}" for version, same in groupby(versions.tolist()))
