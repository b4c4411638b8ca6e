"""Messages between a script or notebook and the process of its run, as JSON lines over a socket.

script -> run    one `RunRequest`; the socket closes when the script ends
run -> script    a `RunReply` with the run's folder when it exists, and a `RunReply` with the error if the run fails
"""

import msgspec

from streamppo.types import JsonObject, WireStruct


class RewardSource(WireStruct, frozen=True):
    """A reward: its name in `source` or, if `source` is empty, the value of `reward.function`."""

    function: str
    source: str = ""


class RunRequest(WireStruct, frozen=True):
    """Asks to start a run from the file `config` or the table `fields`, or to resume the run in `folder`.

    `data` is a file with the rows of the run, which the process of the run copies.
    """

    config: str = ""
    fields: JsonObject | None = None
    data: str = ""
    folder: str = ""
    overrides: tuple[str, ...] = ()
    runs: str = ""
    reward: RewardSource | None = None
    accept_changes: bool = False


class RunReply(WireStruct, frozen=True):
    """The run's `folder`, or the run's `error`: the name of a class in `streamppo.errors`, and its `text`."""

    folder: str = ""
    error: str = ""
    text: str = ""


def encode(message: RunRequest | RunReply) -> bytes:
    """Encode a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"
