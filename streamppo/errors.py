"""Every exception that streamppo raises on purpose.

StreamppoError
├── ConfigError            the configuration is wrong: says the file, the line and the nearest name
├── TaskError              a data set or a reward cannot be loaded or used
│   ├── RewardFailed       one trajectory has no reward: failed, never 0
│   ├── TeacherFailed      one trajectory has no log-probs of the teacher: failed, never 0
│   ├── EnvironmentFailed  an environment raised or took too long: the trajectory is failed
│   ├── Retryable          raised by a reward: the same call may work a little later
│   └── TooManyFailures    rewards or engines failed more often than the config allows
├── ModelError             a model folder that no engine of ours can run
├── UpdateError            a batch that must not be trained on, or gradients that stay non-finite
├── WeightsError           a push that does not verify: the old version stays
├── CheckpointError        a checkpoint that is missing, damaged or of another run
├── JournalError           a journal or an archive that is damaged or cannot be written: says the file
├── Diverged               a redone update made other weights than it did the first time
├── QueueError             a request that the queue's rules refuse
└── RunError               a stage died or stalled; the message names the stage
    ├── LearnerLost        a learner rank died; the supervisor starts all of them again
    └── Interrupted        SIGINT, SIGTERM or SIGHUP
"""

import signal

UNREADABLE = (ValueError, RecursionError)
"""What msgspec raises for JSON or msgpack of strangers: its own errors, and that of text which is not UTF-8."""


class StreamppoError(Exception):
    """Base of all: catching this catches what streamppo foresaw, and nothing else.

    A command that ends by it has the exit code `exit_code`.
    """

    exit_code = 1


class ConfigError(StreamppoError):
    """The configuration is wrong."""

    exit_code = 2


class TaskError(StreamppoError):
    """A data set or a reward cannot be loaded or used."""


class RewardFailed(TaskError):
    """This trajectory has no reward; the message is the reason."""


class TeacherFailed(TaskError):
    """The teacher's server has given no log-probs of this trajectory; the message is the reason."""


class EnvironmentFailed(TaskError):
    """The environment of this trajectory raised, took too long, or gave no usable answer.

    So many `tokens` were sampled for it, as far as is known.
    """

    def __init__(self, reason: str = "", tokens: int = 0) -> None:
        super().__init__(reason)
        self.tokens = tokens


class Retryable(TaskError):
    """For rewards to raise: the call failed, and may work when it is tried again a little later.

    Any exception with a true attribute `retryable` is understood in the same way.
    """

    retryable = True


class TooManyFailures(TaskError):
    """More trajectories failed than `queue.max_failure_rate` allows; the message quotes the first reasons."""


class ModelError(StreamppoError):
    """A model folder that cannot be loaded or run."""


class UpdateError(StreamppoError):
    """A batch that must not be trained on, or gradients that stay non-finite."""


class WeightsError(StreamppoError):
    """A version that is not whole, not as it was pushed, or that does not fit the engine's parameters."""


class CheckpointError(StreamppoError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class JournalError(StreamppoError):
    """A journal or an archive that is missing, damaged, or cannot be written; the message names the file."""


class Diverged(StreamppoError):
    """An update that was redone from the archive made other weights than it did the first time."""


class QueueError(StreamppoError):
    """A request that the queue's rules refuse."""


class RunError(StreamppoError):
    """A stage died or stalled."""


class LearnerLost(RunError):
    """A learner rank died, and with it the group."""


class Interrupted(RunError):
    """A signal asked the run to stop: its `number`."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number
