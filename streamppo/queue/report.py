"""Describes the queue's state: its counters, and a sentence about the wait for the next batch."""

from collections import Counter

from streamppo.queue.rules.records import GIVEN_UP, Ending
from streamppo.queue.rules.slot import ISSUED, OPEN, READY
from streamppo.queue.rules.state import QueueSettings, QueueState
from streamppo.types import QueueReport

DROPPED: tuple[Ending, ...] = ("too_old", *GIVEN_UP)
"""Reasons why a stored trajectory was not trained on."""
REFUSED = ("failed", "dead_letters", "duplicates")
"""Reasons why a delivery was not stored."""


def report(state: QueueState) -> QueueReport:
    """Counters since the run began, and the queue's present contents."""
    counts, dropped = state.counts, state.dropped
    waiting = Counter(slot.state for slot in state.waiting())
    return QueueReport(
        version=state.version,
        ready=waiting[READY],
        in_flight=waiting[ISSUED],
        issued=state.opened,
        stored=counts["stored"],
        consumed=counts["consumed"],
        cut=counts["cut"],
        orphaned=counts["orphaned"],
        skipped_prompts=counts["skipped_prompts"],
        duplicates=counts["duplicates"],
        dead_letters=counts["dead_letters"],
        dropped={reason: dropped[reason] for reason in DROPPED} | {"lost": counts["lost"]},
        masked_tokens=counts["masked_tokens"],
        failed=dict(state.failed),
        mean_tokens_consumed=state.tokens["consumed"] / max(1, counts["consumed"]),
        mean_tokens_dropped=state.tokens["too_old"] / max(1, dropped["too_old"]),
        tokens=_ledger(state),
    )


def _ledger(state: QueueState) -> dict[str, int]:
    ready = [slot.trajectory for slot in state.waiting() if slot.trajectory is not None]
    leased = [trajectory for batch in state.leases.values() for trajectory in batch.batch.trajectories]
    return {
        **{name: state.tokens[name] for name in ("delivered", "consumed", *DROPPED, *REFUSED)},
        "waiting": sum(trajectory.num_sampled for trajectory in ready),
        "leased": sum(trajectory.num_sampled for trajectory in leased),
    }


def waiting_for(settings: QueueSettings, state: QueueState) -> str:
    """Return a sentence that says why the next batch is incomplete."""
    actors = Counter(slot.actor for slot in state.slots.values() if slot.actor is not None)
    in_flight = ", ".join(f"{count} at {actor}" for actor, count in sorted(actors.items())) or "none"
    to_be_sampled = sum(slot.state is OPEN for slot in state.slots.values())
    leased = ", ".join(map(str, sorted(state.leases))) or "none"
    return (
        f"is at version {state.version} with {state.ready_units * settings.unit_size} of {settings.batch_size} "
        f"trajectories ready, {to_be_sampled} to be sampled, in flight: {in_flight}, batches leased: {leased}"
    )
