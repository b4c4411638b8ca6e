"""The data of one run in a report, and the tables and timelines that are computed from them."""

import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

from markupsafe import Markup, escape

from streamppo.errors import StreamppoError
from streamppo.telemetry import context_reuse, metrics_file, progress, timeline
from streamppo.telemetry import summary as summaries
from streamppo.telemetry.attempts import AttemptTable
from streamppo.telemetry.diagnosis import Sign
from streamppo.telemetry.metrics_file import FINISHED, EvaluationLine, Line, version_of
from streamppo.telemetry.progress import WORSE
from streamppo.telemetry.report.plot import MOST_POINTS, Event, abbreviate
from streamppo.telemetry.summary import Summary
from streamppo.telemetry.timeline import EngineInterval
from streamppo.types import QueueReport

T = TypeVar("T")
AGES = 12
"""The first `AGES` ages of reused tokens have a row each. Older tokens share a row."""


def make_part(part: Callable[[], T]) -> tuple[T | None, str]:
    """Compute a part of a page. Returns (part, ""), or (None, the reason) if the computation fails."""
    try:
        return part(), ""
    except StreamppoError as error:
        return None, str(error)
    # If the code of one part has a bug, the page shows the error there, and the other parts as usual.
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        return None, f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})"


def or_dash(value: float | None, form: str) -> str:
    """Format a number with `form`, such as "{:.3f}"; "-" for None."""
    return "-" if value is None else form.format(value)


def section(caller: Callable[[], Markup]) -> Markup:
    """Return a section of a page, or a paragraph with the reason if the section cannot be computed."""
    content, why = make_part(caller)
    return Markup(f'<p class="none">{escape(why)}</p>') if content is None else content


class TextPiece(NamedTuple):
    """The text of consecutive tokens with the same lag. `lag` is None if the policy did not sample the tokens."""

    text: str
    lag: int | None


class TrainedSample(NamedTuple):
    """A trajectory in the batch of the update that made `version`, with its text."""

    version: int
    title: str
    reward: float
    prompt: str
    pieces: Sequence[TextPiece]


class NamedNumber(NamedTuple):
    """A row of a table: a name, a number as text, and a remark."""

    name: str
    value: str
    remark: str = ""


@dataclass(slots=True)
class View:
    """One run, or a replay, which has only `lines`. `queue` has the counters of the journal, if there is a journal."""

    name: str
    lines: Sequence[Line]
    summary: Summary | None = None
    config: str = ""
    queue: QueueReport | None = None
    attempts: AttemptTable | None = None
    samples: list[TrainedSample] = field(default_factory=list[TrainedSample])
    failures: Sequence[NamedNumber] = ()
    findings: Sequence[Sign] = ()
    notes: list[str] = field(default_factory=list[str])
    is_replay: bool = False

    @property
    def outcome(self) -> str:
        if self.is_replay:
            return "replayed"
        last = next((line for line in reversed(self.lines) if "end" in line or "part" in line), None)
        if last is None or "end" not in last:
            return "running, or killed"
        is_fall = last["end"] == FINISHED and progress.is_worse(evaluations(self))
        return f"{FINISHED}, {WORSE}" if is_fall else last["end"]


def evaluations(view: View) -> list[EvaluationLine]:
    """Return the evaluation lines of a run."""
    return [line for line in view.lines if "evaluation" in line]


def condition_class(condition: str) -> str:
    """Return the CSS class for a run's condition or outcome. Unknown texts get the class "failed"."""
    texts = {FINISHED: FINISHED, "running": "running", "killed": "killed", "replayed": "replayed"}
    if condition.startswith("Interrupted"):
        return "stopped"
    return texts.get(condition) or ("running" if condition.startswith("running") else "failed")


def condition_word(condition: str) -> str:
    """Return `condition`; of an error only the first line."""
    return condition.strip().partition("\n")[0] if condition_class(condition) == "failed" else condition


def signs(view: View) -> tuple[list[Sign], list[Sign]]:
    """Return the findings that hold, and the findings that have ended."""
    return [sign for sign in view.findings if sign.holds], [sign for sign in view.findings if not sign.holds]


def headline(view: View) -> list[NamedNumber]:
    """Return the most important numbers of a run."""
    totals = summaries.line_totals(view.lines)
    rows = [NamedNumber("verdict", totals["verdict"])] if totals["verdict"] else []
    rows += [NamedNumber("outcome", view.outcome), NamedNumber("updates", f"{totals['updates']}")]
    rows += [
        NamedNumber("time", duration(totals["wall_s"]), f"in {totals['parts']} parts" if totals["parts"] > 1 else "")
    ]
    for name, ends in (("held-out accuracy", totals["eval_accuracy"]), ("reward", totals["reward"])):
        if ends["start"] is not None and ends["final"] is not None:
            rows.append(NamedNumber(name, f"{ends['final']:.3f}", f"{ends['start']:.3f} at the start"))
    lag = totals["trained_lag"]
    if lag["mean"] is not None:
        rows.append(NamedNumber("lag of trained tokens", f"{lag['mean']:.2f}", f"versions; at most {lag['max']}"))
    rows.append(NamedNumber("tokens trained on", abbreviate(totals["tokens_trained"])))
    rows.append(NamedNumber("learner waits", f"{totals['learner_idle_share']:.0%}", "of its time"))
    if view.summary and (engines := view.summary["engines"]):
        rows.append(NamedNumber("engines idle", f"{engines['idle_share']:.0%}", "of their time"))
        rows.append(NamedNumber("sampled", f"{abbreviate(engines['tokens_per_s'])}/s", "tokens, all engines together"))
    shares = context_reuse.mean_shares(context_reuse.newest_lines(view.lines))
    if shares.contexts is not None:
        rows.append(NamedNumber("contexts reused", f"{shares.contexts:.0%}", "of earlier turns' contexts"))
    restarts = sum(totals["restarts"].values())
    return [
        *rows,
        NamedNumber("push", f"{totals['push_ms']:.0f} ms", "in the mean"),
        NamedNumber("restarts", f"{restarts}"),
    ]


class RunsTable(NamedTuple):
    """The headlines of several runs as a table. A row is a name and one value per run."""

    runs: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]


def compare_headlines(views: Sequence[View]) -> RunsTable | None:
    """Return the headlines of several runs as a table; None for a single run."""
    if len(views) < 2:
        return None
    headlines = [{row.name: row.value for row in headline(view)} for view in views]
    names = list(dict.fromkeys(name for rows in headlines for name in rows))
    return RunsTable(
        [view.name for view in views], [(name, [rows.get(name, "") for rows in headlines]) for name in names]
    )


def ledger(view: View) -> tuple[list[NamedNumber], str]:
    """Return the number of tokens with each outcome, and a sentence that compares their sum with the delivered tokens.

    The learner counts the tokens in batches, the queue counts all others. Both counts end at the journal's version, so
    lines of later updates are excluded.

    Example: 100 tokens were delivered, 20 are waiting, and the lines of updates have 70. The sum is 90: 10 less.
    """
    if view.queue is None:
        return [], ""
    tokens, version = view.queue.tokens, view.queue.version
    updates = [line for line in summaries.updates_in_order(view.lines) if version_of(line) <= version]
    missing, counts = version - len(updates), [metrics_file.numbers(line) for line in updates]
    trained, masked, all_tokens = (
        round(sum(count.get(name, 0) for count in counts)) for name in ("tokens_trained", "tokens_too_old", "tokens")
    )
    unknown = tokens["consumed"] - all_tokens if missing else 0
    parts = [
        ("trained on", trained, ""),
        ("masked", masked, "beyond queue.max_lag: in a batch, but not in its loss"),
        ("left out", all_tokens - trained - masked, "in a batch, but not in its loss: filters, equal groups"),
        ("trained on or not", unknown, "in batches of updates that have no line in metrics.jsonl"),
        ("dropped: too old", tokens["too_old"], "sampled again"),
        ("dropped: abandoned", tokens["abandoned"], "another sample of the group failed too often"),
        ("dropped: resampled", tokens["resampled"], "the group had no learning signal"),
        ("failed", tokens["failed"], "sampled, but without a score"),
        ("dead letters", tokens["dead_letters"], "could not be trained on"),
        ("duplicates", tokens["duplicates"], "not expected: delivered twice, or by an actor marked dead"),
        ("waiting", tokens["waiting"], "ready in the queue"),
        ("leased", tokens["leased"], "in the batch of an update that has not published its version"),
    ]
    rows = [NamedNumber(name, f"{count:,}", remark) for name, count, remark in parts if count or name == "trained on"]
    return rows, _sum(tokens["delivered"], sum(count for _, count, _ in parts), version, missing)


def _sum(delivered: int, total: int, version: int, missing: int) -> str:
    text = f"{delivered:,} tokens were delivered up to version {version:,}: "
    if total != delivered:
        return f"{text}the sum has {abs(delivered - total):,} {'less' if total < delivered else 'more'}."
    if missing:
        lines = "line of 1 update is" if missing == 1 else f"lines of {missing:,} updates are"
        return f"{text}exactly the sum. The {lines} missing, so the queue's count is used for their tokens."
    return f"{text}exactly the sum of the learner's and the queue's counts."


def lengths(view: View) -> list[NamedNumber]:
    """Return the mean lengths of trained, dropped and all sampled completions, and the bias of the trained ones."""
    if view.queue is None or not view.queue.consumed:
        return []
    queue, dropped = view.queue, view.queue.dropped["too_old"]
    sampled = (queue.tokens["consumed"] + queue.tokens["too_old"]) / (queue.consumed + dropped)
    bias = queue.mean_tokens_consumed / max(sampled, 1e-9) - 1
    rows = [NamedNumber("trained on", f"{queue.mean_tokens_consumed:.2f}", "tokens a completion, mean")]
    if dropped:
        rows.append(NamedNumber("dropped: too old", f"{queue.mean_tokens_dropped:.2f}", f"{dropped:,} completions"))
    return [*rows, NamedNumber("both", f"{sampled:.2f}", f"bias of the trained ones {bias:+.1%}")]


ATTEMPTS = ("attempts", "failed", "dropped", "lost", "masked", "undelivered", "reward", "all others 0")


def attempts(view: View) -> tuple[str, RunsTable] | None:
    """Return a sentence and a table about how attempts ended; None if the view has no `attempts`."""
    if (table := view.attempts) is None:
        return None
    rows = [
        (
            f"{row['by']} {row['name']}".strip(),
            (
                f"{row['attempts']:,}",
                *(f"{row[name]:.1%}" if row[name] else "" for name in ("failed", "dropped", "lost", "masked")),
                f"{row['undelivered']:.1%}" if row["undelivered"] else "",
                *("" if value is None else f"{value:.4f}" for value in (row["reward"], row["as_zero"])),
            ),
        )
        for row in table["rows"]
    ]
    total, shift = table["rows"][0], table["advantage_shift"]
    if total["reward"] is None or total["as_zero"] is None or shift is None:
        return "Nothing was trained on.", RunsTable(ATTEMPTS, rows)
    if not (total["failed"] or total["dropped"] or total["lost"]):
        return "Every attempt was trained on.", RunsTable(ATTEMPTS, rows)
    text = (
        f"With 0 for each attempt that was not trained on, the mean reward would be {total['as_zero']:.4f}, and not "
        f"{total['reward']:.4f}; the trained advantages would change by {shift:+.4f} on average"
    )
    if table["advantage_deviation"]:
        text += f", {shift / table['advantage_deviation']:.2f} of their standard deviation"
    if table["read"] < table["batches"]:
        text += f". Trained attempts are counted in {table['read']:,} of {table['batches']:,} batches"
    if test := table["length_test"]:
        text += f". Failed completions are longer than trained ones in {test['longer']:.0%} of the pairs"
        text += f" (z = {test['z']:.1f})"
    return f"{text}.", RunsTable(ATTEMPTS, rows)


def reuse(view: View) -> list[NamedNumber]:
    """Return the shares of tokens that came from caches, and the number of these tokens by the age of the weights."""
    reused = context_reuse.mean_shares(context_reuse.newest_lines(view.lines))
    rows = list[NamedNumber]()
    if reused.prefixes is not None:
        rows.append(NamedNumber("prompts", f"{reused.prefixes:.0%}", "prefix_reused: tokens that came from a cache"))
    if reused.contexts is not None:
        rows.append(NamedNumber("contexts of turns", f"{reused.contexts:.0%}", "context_reused; turns allow 100%"))
    # Age 0 alone is not shown: in every run, samples take their prompt from the cache at age 0.
    ages = reused.ages if any(reused.ages) else {}
    rows += [
        NamedNumber(f"computed {age:,} versions before", f"{count:,}", "tokens from a cache")
        for age, count in list(ages.items())[:AGES]
    ]
    if older := sum(list(ages.values())[AGES:]):
        rows.append(NamedNumber("computed earlier", f"{older:,}", "tokens from a cache"))
    return rows


AGENTS = {
    "runs": "played to their end",
    "failed": "without a reward: sampled again",
    "requests": "in all runs",
    "joined": "repeated before the answer was complete",
    "disconnected": "disconnected before the answer",
    "cut off at the end": "not answered when their run ended",
    "over budget": "beyond max_turns or max_tokens",
    "undelivered tokens": "sampled but not received, and not trained on",
}
"""The meaning of agents' counters, in the order of the table. Counters without a meaning here follow."""


def agents(view: View) -> list[NamedNumber]:
    """Return the number of agents' requests with each outcome, over all rollout actors of the run's newest part."""
    counts: Counter[str] = Counter()
    for line in context_reuse.newest_lines(view.lines):
        counts.update(line.get("agents", {}))
    names = [*(name for name in AGENTS if name in counts), *sorted(counts.keys() - AGENTS.keys())]
    return [NamedNumber(name, f"{counts[name]:,}", AGENTS.get(name, "")) for name in names]


def events(view: View) -> list[Event]:
    """Return the timeline's events: updates, waits, pushes, actors' work, evaluations, restarts, parts, the end."""
    listed: list[Event] = []
    updates = [line for line in view.lines if "update" in line]
    for line in updates[:: max(1, len(updates) // MOST_POINTS + 1)]:
        begin, end, push_s = timeline.requested_s(line), line["wall_s"], line["push_ms"] / 1e3
        ready, name = begin + line["wait_s"], f"update {line['update']}"
        listed.append(Event("learner", begin, ready, f"{name}: waited {line['wait_s']:.2f} s", 7))
        reward = f", reward {line['reward']:.3f}" if "reward" in line else ""
        listed.append(Event("learner", ready, end, f"{name}: {end - ready:.2f} s{reward}", 0))
        listed.append(Event("push", begin, begin + push_s, f"version {line['update'] - 1}: {push_s:.2f} s", 2))
    intervals = list(timeline.engine_intervals(view.lines))
    listed += [_engine(interval) for interval in intervals[:: max(1, len(intervals) // MOST_POINTS + 1)]]
    listed += _unreported(view.lines, intervals)
    for line in view.lines:
        if (described := timeline.describe_event(line)) is not None:
            lane, before, colour = INSTANTS[described[0]]
            colour = FINISHED_COLOUR if line.get("end") == FINISHED else colour
            listed.append(Event(lane, line["wall_s"], line["wall_s"], before + described[1], colour))
    return listed


def _unreported(lines: Sequence[Line], intervals: Sequence[EngineInterval]) -> list[Event]:
    """Return an event for each rollout actor: the time after its newest line, for which there are no data."""
    end_s = max((line["wall_s"] for line in lines), default=0.0)
    begun_s = max((line["wall_s"] for line in lines if "part" in line), default=0.0)
    newest = {
        interval.line["engine"]: interval.line["wall_s"] for interval in intervals if interval.line["wall_s"] >= begun_s
    }
    text = "{}: no report since second {:.0f}"
    return [Event(name, at, end_s, text.format(name, at), UNREPORTED) for name, at in newest.items() if at < end_s]


def _engine(interval: EngineInterval) -> Event:
    before, line = interval
    versions = f"version {before['version']}" + (
        f" to {line['version']}" if line["version"] != before["version"] else ""
    )
    text = f"{line['engine']}: {abbreviate(interval.tokens_per_s)} tokens/s, idle {interval.idle:.0%}, {versions}"
    return Event(line["engine"], before["wall_s"], line["wall_s"], text, 5, 0.15 + 0.85 * (1 - interval.idle))


UNREPORTED, FINISHED_COLOUR = 8, 2
"""The colours (indices of the page's style) of time without data, and of a successful end."""
INSTANTS = {
    "evaluation": ("evaluation", "after update ", 1),
    "restart": ("restart", "", 3),
    "part": ("driver", "", 4),
    "end": ("driver", "", 3),
}
"""The lane, text prefix and colour of each kind of instant event."""


def duration(seconds: float) -> str:
    """Format seconds: 4000 -> 1 h 06 min."""
    hours, remainder_s = divmod(round(seconds), 3600)
    minutes, seconds_left = divmod(remainder_s, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds_left:02d} s" if minutes else f"{remainder_s} s"
