"""Messages between the process of a script or notebook and that of its run: lines of JSON over a socket.

script -> run    one Request; the end of the stream is the end of the script
run -> script    Told: the run's folder once there is one, and the error that has ended it, if one has
"""

import msgspec

from streamppo.types import WireStruct


class RewardSource(WireStruct, frozen=True):
    """A reward: the value of `reward.function`; or, with a `source`, the name of the reward in it."""

    function: str
    source: str = ""


class RunRequest(WireStruct, frozen=True):
    """A run to start, by its `config` file, or to go on with, by its `folder`."""

    config: str = ""
    folder: str = ""
    overrides: tuple[str, ...] = ()
    runs: str = ""
    reward: RewardSource | None = None
    accept_changes: bool = False


class RunReply(WireStruct, frozen=True):
    """The folder of the run, or the class of an error of streamppo and its words."""

    folder: str = ""
    error: str = ""
    text: str = ""


def line(message: RunRequest | RunReply) -> bytes:
    """Write a message as one line."""
    return msgspec.json.encode(message) + b"\n"
