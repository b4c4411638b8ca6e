"""The rows of the live view about the pipeline: lag, queue, waiting, speed and memory."""

from rich.text import Text

from streamppo.telemetry import context_reuse
from streamppo.telemetry.live.drawing import bar
from streamppo.telemetry.live.state import RunState
from streamppo.terminal import counted

LABEL = 10
WAITS = 0.1
"""The learner waits, or the engines wait, if idle for at least this share of the time."""
BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, None))
"""Buckets of lags. All lags from 9 on share a bucket, so that the row fits the terminal."""
TALL_BAR = 24
"""Cells of the longest bar if each bucket of lags has its own row."""


def labelled_row(label: str, *parts: str | tuple[str, str]) -> Text:
    """Return a row that begins with its label."""
    return Text.assemble((f"{label:<{LABEL}}", "dim"), *parts)


def pipeline(state: RunState, width: int, *, tall: bool = False) -> list[list[Text]]:
    """Return the rows of lag, queue, waiting, speed and memory. `tall` gives each bucket of lags a row."""
    lags = _tall_lags(state, width) if tall else _lags(state, width)
    return [lags, _queue(state, width), waits(state, width), _speed(state, width), _memory(state)]


def waits(state: RunState, width: int) -> list[Text]:
    """Show the newest shares of time for which the learner waited and the engines were idle."""
    learner, engines = state.learner_waits, state.engines_idle
    if learner is None:
        return []
    row = labelled_row("waiting", "learner ", _share(learner), ", engines ", _share(engines))
    return [_if_it_fits(row, f": {verdict(learner, engines or 0.0)}", width)]


def verdict(learner: float, engines: float) -> str:
    """Say whether the learner or the engines wait, given their waiting shares."""
    if max(learner, engines) < WAITS:
        return "neither for long"
    return "learner for engines" if learner >= engines else "engines for learner"


def _if_it_fits(row: Text, more: str, width: int) -> Text:
    return row.append(more, "dim") if row.cell_len + len(more) <= width else row


def _share(share: float | None) -> tuple[str, str]:
    if share is None:
        return ("?", "dim")
    return (f"{share:.0%}", "bold" if share < WAITS else "bold yellow")


def _buckets(state: RunState) -> dict[str, float]:
    """Return the share of the newest tokens in each bucket of lags, up to the bucket of their largest lag."""
    histogram = state.lag_histogram
    total, oldest = sum(histogram.values()), max(histogram, default=0)
    shares: dict[str, float] = {}
    for low, high in BUCKETS:
        if total and low <= oldest:
            count = sum(n for lag, n in histogram.items() if low <= lag and (high is None or lag <= high))
            shares[f"{low}" if low == high else f"{low}+" if high is None else f"{low}-{high}"] = count / total
    return shares


def _lags(state: RunState, width: int) -> list[Text]:
    shares = _buckets(state)
    if not shares:
        return []
    row = labelled_row("lag")
    cells = (width - LABEL) // len(shares) - 8
    for name, share in shares.items():
        row.append(f"{name} ", "dim").append(bar(share, max(1, min(cells, 12))), "cyan").append(f" {share:.0%}  ")
    return [row.append(f"of {state.lag_bound}", "dim")]


def _tall_lags(state: RunState, width: int) -> list[Text]:
    shares = _buckets(state)
    if not shares:
        return []
    longest, cells = max(shares.values()), min(TALL_BAR, width - LABEL - 12)
    rows: list[Text] = []
    for place, (name, share) in enumerate(shares.items()):
        drawn = bar(share / longest, cells)
        rows.append(labelled_row("" if place else "lag", (f"{name:<4}", "dim"), (f"{drawn} ", "cyan"), f"{share:.0%}"))
    rows[-1].append(f"  of at most {state.lag_bound}", "dim")
    return rows


def _queue(state: RunState, width: int) -> list[Text]:
    if not state.ready + state.in_flight:
        return []
    row = labelled_row("queue", (f"{state.ready}", "bold"), f" of {state.batch_size} ready ")
    text = f" {state.in_flight} being sampled"
    cells = max(1, min(20, width - row.cell_len - len(text)))
    filled = bar(state.ready / max(1, state.batch_size), cells)
    return [row.append(filled, "green").append("─" * (cells - len(filled)), "dim").append(text)]


def _speed(state: RunState, width: int) -> list[Text]:
    row = labelled_row("speed")
    sampled, trained, update_s = state.sampled_per_s, state.trained_per_s, state.update_s
    if sampled is None and trained is None:
        return []
    if sampled is not None:
        row.append(f"{sampled:,.0f}", "bold").append(" tokens/s sampled  ")
    if trained is not None:
        row.append(f"{trained:,.0f}", "bold").append(" trained  ")
    if update_s is not None:
        row = _if_it_fits(row, f"{update_s:.2g} s an update", width)
    contexts = context_reuse.mean_shares([engine.line for engine in state.engines.values()]).contexts
    return [row if contexts is None else _if_it_fits(row, f"  contexts {contexts:.0%} reused", width)]


def _memory(state: RunState) -> list[Text]:
    """Show the memory of the driver's machine, the peak GPU memory of rank 0, and the number of restarts."""
    row = labelled_row("memory")
    if state.memory is not None:
        used, total = state.memory
        row.append(f"{used:.1f}", "bold").append(f" of {total:.1f} GiB on this machine  ")
    if (peak := state.newest.get("peak_memory_mib")) is not None:
        row.append(f"{peak / 1024:.1f}", "bold").append(" GiB of the learner's GPU  ")
    if state.restarts:
        row.append(counted(state.restarts, "restart"), "yellow")
    return [row] if row.cell_len > LABEL else []
