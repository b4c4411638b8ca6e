"""The rules for segments: how far engines may run ahead, and when a batch has to wait. Pure, as in rules.py.

Update u trains from version u. `S` is the lag that admission aims at, `L` is max_lag; S = max(1, L - 1) if segments are
cut just in time, else L.

    a cut       an engine that swaps to version v delivers every segment whose oldest token is of v - S or before, and
                some segments earlier, so that not too many are due at once (rollout/segment_cuts.py)
    a place     each waiting segment takes one, and so does the rest of its completion, which the cut has opened
    admission   as for whole completions, with S in place of L, and with the slowest actor's last cut as version
    the take    segments with the oldest tokens first (take.py); it waits for actors whose cuts could still be due

So every due segment finds room in a batch. Cuts by length open places too, and admission counts them in advance: for
each completion in flight, the average number of cuts of an ended completion. This is an average, not a bound: if a
completion has more cuts, tokens may become too old and are masked.
"""

from streamppo.queue.rules.state import QueueSettings, QueueState


def last_cut(state: QueueState) -> int | None:
    """The newest version for which all sampling actors have cut and delivered; None if no actor samples."""
    return min((state.cut_for.get(actor, -1) for actor in state.issued), default=None)


def expected_cuts(settings: QueueSettings, state: QueueState) -> int:
    """The places that cuts by length will open for completions in flight, at the average of ended completions."""
    if settings.segments is None or not settings.segments.max_tokens:
        return 0
    cut, ended = state.counts["cut"], state.counts["stored"] - state.counts["cut"]
    return sum(state.issued.values()) * cut // max(1, ended)


def is_behind(settings: QueueSettings, state: QueueState, min_version: int) -> bool:
    """True if an actor may still hold a segment with tokens that would be too old for the batch after this one."""
    newest = last_cut(state)
    # After a cut for version v only tokens of v - S + 1 or later are uncut.
    return newest is not None and max(0, newest - settings.flow_lag + 1) <= min_version
