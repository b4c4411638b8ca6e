"""Refusals of the endpoint: the status, a code known to clients of every dialect, a sentence, and its counter."""


class RequestRefused(Exception):
    """A refused request. `reason` is the name of its counter."""

    def __init__(self, status: int, code: str, message: str, reason: str) -> None:
        super().__init__(message)
        self.status, self.code, self.reason = status, code, reason


def bad(message: str, reason: str = "unusable request") -> RequestRefused:
    """Make the refusal of a malformed request."""
    return RequestRefused(400, "invalid_request_error", message, reason)


def ended() -> RequestRefused:
    """Make the refusal of an ended run's request."""
    return RequestRefused(
        410, "session_ended", "the run of this key has ended: nothing more is sampled for it", "after its end"
    )


def spent(message: str) -> RequestRefused:
    """Make the refusal of a request beyond the run's budget."""
    return RequestRefused(400, "context_length_exceeded", message, "over budget")
