"""Messages between the process of a script or notebook and the process of its run: JSON lines over a socket.

script -> run    one `RunRequest`; the stream ends when the script ends
run -> script    `RunReply`: the run's folder once it exists, and the error that ended the run, if any
"""

import msgspec

from streamppo.types import WireStruct


class RewardSource(WireStruct, frozen=True):
    """A reward. `function` is the value of `reward.function`; with a `source`, the reward's name in that source."""

    function: str
    source: str = ""


class RunRequest(WireStruct, frozen=True):
    """A run to start from a `config` file, or to resume in a `folder`."""

    config: str = ""
    folder: str = ""
    overrides: tuple[str, ...] = ()
    runs: str = ""
    reward: RewardSource | None = None
    accept_changes: bool = False


class RunReply(WireStruct, frozen=True):
    """The run's folder, or an error: its class in `streamppo.errors` and its text."""

    folder: str = ""
    error: str = ""
    text: str = ""


def encode(message: RunRequest | RunReply) -> bytes:
    """Encode a message as a line of JSON."""
    return msgspec.json.encode(message) + b"\n"
