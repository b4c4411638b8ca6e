"""Lays out the state of a run as rows of text for a terminal of any size.

below 60 columns or 8 rows     one line: the progress of the run
from 60 columns                one column; if not all rows fit, the most important rows
from 120 columns               curves on the left, the pipeline on the right

If the terminal has more rows, curves are taller.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest

from rich.text import Text

from streamppo.telemetry.live.drawing import bar, curve, seconds, truncate
from streamppo.telemetry.live.pipeline import LABEL, labelled_row, pipeline, waits
from streamppo.telemetry.live.state import CurveValues, RunState
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.progress import ScoredVersion
from streamppo.terminal import harmless

LEAST_COLUMNS, LEAST_ROWS = 60, 8
"""A smaller terminal shows one line."""
WIDE = 120
"""With at least this number of columns the layout has two columns."""
GAP = 4
STYLES = {"reward": "green", "entropy": "blue", "ess": "magenta", "length": "yellow", "lag_mean": "cyan"}
LABELS = {"reward": "reward", "entropy": "entropy", "ess": "ess", "length": "length", "lag_mean": "lag"}
"""The labels of the curves, the most important first."""
CTRL_C = "Ctrl-C: save a last checkpoint and end; twice: end at once"
STOPPING = "stopping: a last checkpoint is saved; Ctrl-C: end at once"
VALUE, RANGE = 8, 14
"""Cells for the newest value, left of a curve, and for the range of values, right of the curve."""
TREND = 3
"""If there are at least so many evaluations, the x axis of the accuracy's curve is the version."""
TALLEST = 8
VERSION = 7


def view(state: RunState, columns: int, rows: int) -> list[Text]:
    """Return the rows of the view, each of at most `columns` - 1 cells. Some of `rows` stay free for log lines."""
    width, room = columns - 1, min(rows - 1, max(rows * 3 // 4, 12))
    if columns < LEAST_COLUMNS or rows < LEAST_ROWS:
        texts = [_line(state, width)]
    elif columns < WIDE:
        texts = _narrow(state, width, room)
    else:
        texts = _wide(state, width, room)
    for row in texts:
        row.truncate(max(width, row.cell_len) if width < 0 else width)
    return texts[: max(1, rows - 1)]


def final_rows(state: RunState, columns: int) -> list[Text]:
    """Return the rows that remain on the terminal after the run."""
    width = columns - 1
    if columns < LEAST_COLUMNS:
        return [_line(state, width)]
    texts = [_progress(state, width), *_curve(state, "reward", width, 1)]
    texts += [*_held_out(state, width), *waits(state, width)]
    texts += [_warning(state, width)] if state.present_warning else []
    if state.ended not in ("", FINISHED):
        texts.append(labelled_row("ended", (truncate(harmless(state.ended), width - LABEL), "bold red")))
    for row in texts:
        row.truncate(width)
    return texts


def _narrow(state: RunState, width: int, room: int) -> list[Text]:
    """Choose sections by importance until `room` rows are used. If all sections fit, make the curves taller."""

    def ranked(height: int) -> list[tuple[int, list[Text]]]:
        return [
            (8, [_title(state, width)]),
            (0, [_progress(state, width)]),
            (1, _curve(state, "reward", width, height)),
            (2, _held_out(state, width, height)),
            *((9 + place, _curve(state, name, width, height)) for place, name in enumerate(("entropy", "ess"))),
            *zip((5, 6, 3, 11, 12), pipeline(state, width), strict=True),
            (4, [_warning(state, width)] if state.present_warning else []),
            (7, _sample(state, width)),
            (8, [_footer(state)]),
        ]

    sections = ranked(_height(lambda height: sum(len(rows) for _, rows in ranked(height)), room))
    chosen, rows_left = set[int](), room
    for place, (_, rows) in sorted(enumerate(sections), key=lambda item: item[1][0]):
        if len(rows) <= rows_left:
            chosen.add(place)
            rows_left -= len(rows)
    return [row for place, (_, rows) in enumerate(sections) if place in chosen for row in rows]


def _wide(state: RunState, width: int, room: int) -> list[Text]:
    half = (width - GAP) // 2
    head_rows = [_title(state, width), _progress(state, width)]
    foot_rows = [_warning(state, width)] if state.present_warning else []
    foot_rows += [*_sample(state, width), _footer(state)]
    middle = max(1, room - len(head_rows) - len(foot_rows) - 2)

    def curves(height: int) -> list[Text]:
        other_curves = [row for name in list(LABELS)[1:] for row in _curve(state, name, half, height)]
        return [*_curve(state, "reward", half, height), *_held_out(state, half, height), *other_curves]

    curve_rows = curves(_height(lambda height: len(curves(height)), middle))
    pipeline_rows = [row for part in pipeline(state, half, tall=True) for row in part]
    rows = [
        _join_columns(a, b, half) for a, b in zip_longest(curve_rows[:middle], pipeline_rows[:middle], fillvalue=Text())
    ]
    blank = [Text()] if room > len(head_rows) + len(rows) + len(foot_rows) + 1 else []
    return [*head_rows, *blank, *rows, *blank, *foot_rows]


def _height(rows: Callable[[int], int], room: int) -> int:
    """Return the largest height of curves with which all rows fit; 1 if none fits."""
    return next((height for height in range(TALLEST, 1, -1) if rows(height) <= room), 1)


def _join_columns(left: Text, right: Text, half: int) -> Text:
    row = left.copy()
    row.truncate(half, pad=True)
    return row.append(" " * GAP).append_text(right)


def _title(state: RunState, width: int) -> Text:
    lasted = seconds(state.wall_s)
    title = truncate(harmless(f"{state.name}  {state.folder}"), width - len(lasted) - 4)
    rule = "─" * max(0, width - len(lasted) - Text(title).cell_len - 2)
    return Text.assemble((title, "bold"), " ", (rule, "dim"), " ", (lasted, "dim"))


def _line(state: RunState, width: int) -> Text:
    """Show the newest update or what the driver waits for. A negative `width` is unknown, and nothing is cut off."""
    text = harmless(state.line or state.doing)
    return Text(text if width < 0 else text[:width])


def _progress(state: RunState, width: int) -> Text:
    """Show the progress of the run, with the time left, what the driver waits for, or at the end the duration."""
    count = f"{state.version}/{state.updates}"
    time_left = seconds(state.wall_s)
    if state.seconds_left and state.doing:
        time_left = f"{seconds(state.seconds_left)} left"
    if state.stopping:
        time_left = "stopping"
    elif not state.doing.startswith("update") and state.doing:
        time_left = harmless(state.doing)
    time_left = truncate(time_left, width // 2)
    share = state.version / state.updates
    room = width - LABEL - len(count) - Text(time_left).cell_len - 10
    filled, colour = bar(share, room), "red" if state.ended not in ("", FINISHED) else "green"
    unfilled = "─" * (room - len(filled))
    return labelled_row(
        "update", (f"{count}  ", "bold"), (filled, colour), (unfilled, "dim"), f" {share:4.0%}  ", (time_left, "bold")
    )


def _curve(state: RunState, name: str, width: int, height: int) -> list[Text]:
    return _drawn(LABELS[name], state.curves[name], width, height, STYLES[name])


def _held_out(state: RunState, width: int, height: int = 1) -> list[Text]:
    """Show the held-out accuracy. `v20` is the version of the newest evaluation."""
    cells = width - VERSION - LABEL - VALUE - RANGE
    accuracies = CurveValues.of(_over_versions(state.held_out, cells))
    rows = _drawn("held-out", accuracies, width - VERSION, height, "bright_cyan")
    if state.held_out:
        rows[0].append(f"  v{state.held_out[-1].version}", "dim")
    return rows


def _over_versions(held_out: Sequence[ScoredVersion], cells: int) -> list[float]:
    """Interpolate the accuracies over versions, one value for each cell, if there are at least `TREND` accuracies."""
    if len(held_out) < TREND or cells < len(held_out):
        return [scored.accuracy for scored in held_out]
    first, last = held_out[0].version, held_out[-1].version
    values = list[float]()
    for (begin, low, _), (end, high, _) in pairwise(held_out):
        while (version := first + len(values) * (last - first) / (cells - 1)) < end:
            values.append(low + (high - low) * (version - begin) / (end - begin))
    return [*values[: cells - 1], held_out[-1].accuracy]


def _drawn(label: str, values: CurveValues, width: int, height: int, style: str) -> list[Text]:
    if not values.means:
        return []
    lines = curve(values.means, width - LABEL - VALUE - RANGE, height)
    newest = Text(f"{values.newest:<{VALUE}.3f}", "bold")
    head = labelled_row(label).append_text(newest).append(lines[0], style)
    low, high = values.low, values.high
    decimals = 3 if 0 < high - low < 0.01 and 0 <= low < 10 else 2
    head.append(f"  {low:.{decimals}f}..{high:.{decimals}f}", "dim")
    return [head, *(Text(" " * (LABEL + VALUE)).append(line, style) for line in lines[1:])]


def _warning(state: RunState, width: int) -> Text:
    when = f"  {seconds(state.warned_s)}"
    return labelled_row(
        "warning", (truncate(harmless(state.warning), width - LABEL - len(when)), "yellow"), (when, "dim")
    )


def _sample(state: RunState, width: int) -> list[Text]:
    """Show the end of a prompt and the beginning of its completion in one row, without control characters."""
    if state.sampled is None:
        return []
    sample = state.sampled
    tail = f"  reward {sample['reward']:.3g}  v{sample['version']}"
    room = width - LABEL - len(tail) - 3
    prompt, completion = harmless(sample["prompt"]), harmless(sample["completion"])
    # Most prompts end with the question. The completion gets half of the row.
    prompt = _tail(prompt, max(room // 2, room - len(completion)))
    shown_completion = truncate(completion, room - Text(prompt).cell_len)
    return [labelled_row("sample", (prompt, "dim"), (" → ", "dim"), shown_completion, (tail, "dim"))]


def _tail(text: str, width: int) -> str:
    short = text
    while Text(short).cell_len > width:
        short = short[max(1, len(short) - width) :]
    return short if short == text else "…" + short[1:]


def _footer(state: RunState) -> Text:
    return Text(STOPPING, "bold yellow") if state.stopping else Text(CTRL_C, "dim")
