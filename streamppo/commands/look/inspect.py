"""`streamppo inspect`: prints an update's batch, the dead letters, or the end of each attempt at a prompt."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

from streamppo.commands.console import echo
from streamppo.commands.look import tree
from streamppo.commands.look.rows import DataRow, RunRows
from streamppo.config.sections import Config, model_path
from streamppo.errors import JournalError
from streamppo.queue.rules.records import Counters, PublishedVersion, SavedSlot
from streamppo.queue.rules.slot import SlotState
from streamppo.queue.store import archive
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.terminal import bounded, counted
from streamppo.types import Batch, Floats, Identity, Trajectory, flags, floats, ints, turns

MOST_TEXT, MOST_REASON, MOST_NAME = 20_000, 2_000, 100
"""Maximum characters of a prompt or completion, of an explanation or reason, and of a name."""
RECORD_NAMES = {"values": "values", "proximal_logprobs": "learner's", "advantages": "advantages"}
"""The learner's recorded numbers of each token, with their printed names."""


def inspect(config: Config, run: Path, update: int | None, count: int) -> int:
    """Print `count` trajectories of the batch that made version `update` (default: the newest version)."""
    batches = archive.open(run)
    batch, record = batches.batch_and_record(batches.version_before(update))
    tokenizer, rows = Tokenizer(model_path(config, run)), RunRows(config, run)
    rewards = [trajectory.reward for trajectory in batch.trajectories]
    too_old = f"tokens of versions below {batch.min_version} are" if batch.min_version > 0 else "no token is"
    echo(
        f"update {batch.version} -> {batch.version + 1}: {len(rewards)} trajectories, mean reward "
        f"{sum(rewards) / len(rewards):.4g}, {too_old} too old"
    )
    for row, trajectory in enumerate(batch.trajectories[:count]):
        numbers = {name: column[row] for name, column in record.items()}
        echo(*_lines(batch, trajectory, numbers, tokenizer), *_row(rows.row_of(trajectory)))
    return 0


def inspect_dead_letters(run: Path, count: int) -> int:
    """Print the newest `count` trajectories that arrived but cannot be trained on."""
    with closing(Journal.open_run(run)) as journal:
        letters = journal.dead_letters()
    echo(f"{len(letters)} dead letters")
    for letter in reversed(letters[-count:]):
        trajectory = letter.trajectory
        # A damaged column may end within an entry.
        tokens = ints(trajectory.tokens[: len(trajectory.tokens) // 4 * 4]).tolist()
        title = f"{_title(trajectory)}: {bounded(letter.reason, MOST_REASON)}"
        echo("", title, f"  tokens      {' '.join(map(str, tokens))}")
    return 0


def inspect_prompt(run: Path, prompt: int) -> int:
    """Print how every attempt at a prompt ended, or its state. Raises `JournalError` if nothing is recorded of it."""
    with closing(Journal.open_run(run)) as journal:
        attempts, counters = _attempts_in_journal(journal, prompt), journal.counters()
        versions, skipped = journal.versions().values(), _skipped(journal, counters, prompt)
    if skipped:
        echo(skipped)
        return 0
    attempts |= _attempts_in_archive(Archive(run / "archive", archive.checksums(versions)), versions, prompt)
    if not attempts and counters is not None and counters.shape.slots_of(prompt).start < counters.opened:
        raise JournalError(f"{run}: prompt {prompt} was issued or skipped, but no record of it was kept (archive.keep)")
    if not attempts:
        raise JournalError(f"{run}: prompt {prompt} was never issued")
    echo(f"{min(attempts).task} prompt {prompt}")
    has_segments = any(identity.segment for identity in attempts)
    for identity, text in sorted(attempts.items()):
        segment = _segment(identity) if has_segments else ""
        echo(f"  sample {identity.sample} attempt {identity.attempt}{segment}: {text}")
    return 0


def _attempts_in_journal(journal: Journal, prompt: int) -> dict[Identity, str]:
    counters = journal.counters()
    if counters is None:
        return {}
    numbers = counters.shape.slots_of(prompt)
    attempts = {
        attempt.identity: f"{attempt.state.replace('_', ' ')}: {bounded(attempt.reason, MOST_REASON)}"
        for attempt in journal.ended_attempts(numbers)
    }
    leases = {place: lease.version for lease in journal.leases() for place in lease.slots}
    slots = journal.slots(numbers)
    return attempts | {slot.identity: _slot_state(slot, leases.get((slot.number, slot.part))) for slot in slots}


def _skipped(journal: Journal, counters: Counters | None, prompt: int) -> str:
    skipped = () if counters is None else journal.skipped(counters.shape.slots_of(prompt))
    if not skipped:
        return ""
    _, count = skipped[0]
    groups = "group" if count == 1 else f"{count} groups"
    return f"prompt {prompt}: skipped by algorithm.curriculum: the last {groups} of its row had no learning signal"


def _attempts_in_archive(batches: Archive, versions: Iterable[PublishedVersion], prompt: int) -> dict[Identity, str]:
    return {
        trajectory.identity: (
            f"trained on by update {version.version}: reward {trajectory.reward:g}, {trajectory.num_tokens} tokens"
        )
        for version in versions
        if version.archived and version.archived.first_prompt <= prompt <= version.archived.last_prompt
        for trajectory in batches.batch(version.version - 1).trajectories
        if trajectory.identity.prompt == prompt
    }


def _slot_state(slot: SavedSlot, leased_version: int | None) -> str:
    if leased_version is not None:
        return f"leased to update {leased_version + 1}"
    match slot.state:
        case SlotState.OPEN:
            return "to be sampled"
        case SlotState.ISSUED:
            return f"issued to {bounded(str(slot.actor), MOST_NAME)}"
        case state:
            return state


def _title(trajectory: Trajectory) -> str:
    identity = trajectory.identity
    name = f"{identity.task} prompt {identity.prompt} sample {identity.sample} attempt {identity.attempt}"
    has_segments = identity.segment or trajectory.finish == "cut"
    return f"{name}{_segment(identity) if has_segments else ''}, by {bounded(trajectory.actor, MOST_NAME)}"


def _segment(identity: Identity) -> str:
    return f" segment {identity.segment}"


def _lines(batch: Batch, trajectory: Trajectory, record: Mapping[str, Floats], tokenizer: Tokenizer) -> Iterator[str]:
    versions = ints(trajectory.versions)
    components = "".join(f", {bounded(name, MOST_NAME)} {value:g}" for name, value in trajectory.components.items())
    end = f"{trajectory.finish}, {trajectory.num_tokens} tokens"
    yield ""
    yield f"{_title(trajectory)}: reward {trajectory.reward:g}{components}, {end}"
    if trajectory.explanation:
        yield f"  explained   {bounded(trajectory.explanation, MOST_REASON)!r}"
    yield from _texts(batch, trajectory, tokenizer)
    yield f"  tokens      {' '.join(map(str, ints(trajectory.tokens).tolist()))}"
    yield f"  log-probs   {_numbers(floats(trajectory.logprobs))}"
    for name, column in record.items():
        yield f"  {RECORD_NAMES[name]:<12}{_numbers(column)}"
    if trajectory.token_rewards:
        yield f"  rewards     {_numbers(floats(trajectory.token_rewards))}"
    if trajectory.teacher_logprobs:
        yield f"  teacher     {_numbers(floats(trajectory.teacher_logprobs))}"
    counts = ", ".join(f"{count} x {version}" for count, version in tree.count_versions(versions))
    age = counted(batch.version - trajectory.oldest_version, "version")
    yield f"  versions    {counts}; oldest token {age} old"
    if not flags(trajectory.mask).all():
        lost = turns.undelivered(trajectory.turns)
        yield f"  not sampled by the policy: {int((~flags(trajectory.mask)).sum()) - lost} tokens"


def _texts(batch: Batch, trajectory: Trajectory, tokenizer: Tokenizer) -> Iterator[str]:
    if not tree.has_tree(trajectory):
        yield f"  prompt      {bounded(tokenizer.decode(ints(trajectory.prompt_tokens)), MOST_TEXT)!r}"
        yield f"  completion  {bounded(tokenizer.decode(ints(trajectory.tokens)), MOST_TEXT)!r}"
        return
    nodes = tree.nodes(batch, trajectory, lambda tokens: tokenizer.spell(tokens.tolist()))
    yield f"  tree        {tree.totals(nodes)}"
    most = max(MOST_NAME, MOST_TEXT // len(nodes))
    yield from (f"    {line}" for line in tree.outline(nodes, lambda text: repr(bounded(text, most))))


def _row(row: DataRow) -> Iterator[str]:
    for name, value in row.columns:
        label = bounded(name, MOST_NAME)
        yield f"  {label:<12}{value}" if name == "answer" else f"  row         {label} = {value}"
    if row.missing:
        yield f"  row         {row.missing}"


def _numbers(column: Floats) -> str:
    return " ".join(f"{value:.3f}" for value in column.tolist())
