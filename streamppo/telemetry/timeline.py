"""When a run's events happened, and the words for those that take no time: the report's timeline and the trace."""

from streamppo.telemetry.metrics_file import Line, UpdateLine


def asked_s(line: UpdateLine) -> float:
    """The second of the run at which an update asked for its batch, and the push of the version before it began."""
    return line["wall_s"] - line["update_s"]


def told(line: Line) -> tuple[str, str] | None:
    """The kind of an event that takes no time, and its words; None for another one."""
    if "evaluation" in line:
        accuracy = "no score" if line["accuracy"] is None else f"accuracy {line['accuracy']:.3f}"
        return "evaluation", f"{line['evaluation']}: {accuracy}"
    if "restart" in line:
        return "restart", f"{line['restart']}: {line['reason']}"
    if "part" in line:
        return "part", f"part {line['part']} begins at version {line['version']}"
    return ("end", f"ends: {line['end']}") if "end" in line else None
