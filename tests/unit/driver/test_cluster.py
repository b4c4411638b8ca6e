"""What is said of Ray's errors."""

from ray.exceptions import ActorDiedError, RayTaskError

from streamppo.driver.cluster import describe
from streamppo.errors import JournalError


def test_of_an_actor_that_died_while_it_was_made_the_reason_is_said() -> None:
    error = JournalError("runs/math/journal.sqlite: damaged: a row of 'slots' does not match its checksum")
    trace = f"Traceback (most recent call last):\n  File x\nstreamppo.errors.JournalError: {error}\n"
    died = ActorDiedError(RayTaskError("QueueActor.__init__", trace, error))
    assert describe(died) == f"JournalError: {error}"
    assert describe(ActorDiedError()) == "ActorDiedError: The actor died unexpectedly before finishing this task."
    assert describe(RayTaskError("begin", trace, error)) == str(error)
