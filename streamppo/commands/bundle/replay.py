"""`streamppo replay FILE`: replays the update of a bundle, and shows the numbers of every token."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

from streamppo.commands.bundle import file, make, update
from streamppo.commands.bundle.file import Bundle
from streamppo.commands.bundle.update import BundleUpdate
from streamppo.commands.console import PLAIN_WIDTH, console, echo, log_to_stderr, table, to_json
from streamppo.errors import ConfigError, Diverged
from streamppo.types import ints

SHOWN = ("policy_loss", "value_loss", "entropy", "proximal_kl", "behavior_kl", "ess", "grad_norm", "lr")
HIDDEN = ("row", "pass", "token", "version", "clipped", "dropped")
"""Columns that only --json has. A row's table also has `pass`, `clipped` and `dropped`, unless all are 0 or ""."""


def replay(path: Path, rows: Sequence[int], changes: Sequence[str], *, trust: bool, debug: bool, as_json: bool) -> int:
    """Replay the update of the bundle at `path`, and print the tokens of `rows` (by default row 0, as JSON all rows).

    Raises the errors of `file.read` and `update.make`. Without `as_json` raises `Diverged` if the new version differs
    from the run's for no known reason.
    """
    bundle = file.read(path)
    count = len(bundle.batch.trajectories)
    if unknown := [row for row in rows if row >= count]:
        raise ConfigError(f"--rows {unknown[0]}: the file has rows 0 to {count - 1}")
    chosen = list(dict.fromkeys(rows)) or list(range(count if as_json else 1))
    with nullcontext() if debug else log_to_stderr():
        replayed = update.make(path, bundle, chosen, changes, trust=trust, debug=debug)
    reasons = list(_differences(bundle, changes))
    if as_json:
        echo(_json(path, bundle, replayed, reasons))
        return 0
    _show(bundle, replayed, chosen)
    echo(_verdict(bundle, replayed, reasons))
    if replayed.digest != bundle.facts.digest and not reasons:
        raise Diverged(f"{path}: version {bundle.facts.state.version + 1} has other weights than in the run")
    return 0


def _differences(bundle: Bundle, changes: Sequence[str]) -> Iterator[str]:
    facts, software = bundle.facts, make.software()
    if changes:
        yield f"--set {' '.join(changes)}"
    if facts.kept:
        yield f"{len(facts.kept)} of the batch's {facts.rows} rows"
    if facts.state.ranks > 1:
        yield f"the gradient was summed over {facts.state.ranks} ranks in the run, over one here"
    if facts.gpu and not torch.cuda.is_available():
        yield "the run's rank had a GPU"
    if not facts.exact:
        yield "learner.exact = false"
    for name, recorded in facts.software.items():
        if software[name] != recorded:
            yield f"{name} {recorded} in the run, {software[name]} here"


def _verdict(bundle: Bundle, replayed: BundleUpdate, reasons: Sequence[str]) -> str:
    version = bundle.facts.state.version + 1
    if replayed.digest == bundle.facts.digest:
        return f"version {version} replayed bit for bit: its digest {replayed.digest[:12]} is that of the journal"
    expected = f", recorded {bundle.facts.digest[:12]}" if bundle.facts.digest else ""
    reason = "; ".join(reasons) or "no reason known"
    return f"version {version} replayed with other bits ({replayed.digest[:12]}{expected}): {reason}"


def _json(path: Path, bundle: Bundle, replayed: BundleUpdate, reasons: Sequence[str]) -> str:
    facts = bundle.facts
    content = {
        "file": str(path),
        "run": facts.run,
        "update": facts.state.version + 1,
        "digest": replayed.digest,
        "recorded": facts.digest,
        "same": replayed.digest == facts.digest,
        "differences": list(reasons),
        "metrics": replayed.metrics,
        "tokens": {name: column.tolist() for name, column in replayed.tokens.items()},
    }
    return to_json(content).decode()


def _show(bundle: Bundle, replayed: BundleUpdate, rows: Sequence[int]) -> None:
    facts, trajectories, version = bundle.facts, bundle.batch.trajectories, bundle.facts.state.version
    tokens = sum(trajectory.num_tokens for trajectory in trajectories)
    echo(f"update {version} -> {version + 1} of {facts.run}: {len(trajectories)} rows, {tokens} tokens")
    for row in rows:
        trajectory = trajectories[row]
        number = f", row {facts.kept[row]} of the batch" if facts.kept else ""
        outcome = f"prompt {trajectory.identity.prompt}, reward {trajectory.reward:g}, {trajectory.finish}"
        sizes = f"{len(ints(trajectory.prompt_tokens))} tokens of prompt and {trajectory.num_tokens} of completion"
        echo("", f"row {row}{number}: {outcome}, {sizes}")
        _show_row(replayed, row)
    echo("", ", ".join(f"{name} {replayed.metrics[name]:.4g}" for name in SHOWN if name in replayed.metrics))


def _show_row(replayed: BundleUpdate, row: int) -> None:
    in_row = replayed.tokens["row"] == row
    filled = {name for name in ("pass", "clipped", "dropped") if any(replayed.tokens[name][in_row].tolist())}
    names = [name for name in replayed.tokens if name not in HIDDEN or name in filled]
    rows = table(*names)
    for column, name in zip(rows.columns, names, strict=True):
        column.justify = "left" if name in ("text", "dropped") else "right"
    for entry in zip(*(replayed.tokens[name][in_row].tolist() for name in names), strict=True):
        rows.add_row(*map(_cell, entry))
    # Every token is one line, also on a narrow terminal.
    wide = console()
    wide.width = PLAIN_WIDTH
    wide.print(rows)


def _cell(value: object) -> str:
    match value:
        case bool():
            return "yes" if value else ""
        case float():
            return "-" if np.isnan(value) else f"{value:.3g}"
        case _:
            return str(value)
