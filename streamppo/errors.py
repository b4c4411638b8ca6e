"""The exceptions that streamppo raises on purpose.

StreamppoError
├── ConfigError            the configuration is wrong: file, line and nearest name
├── TaskError              a data set or a reward cannot be loaded or used
│   ├── RewardFailed       one trajectory has no reward: failed, never 0
│   ├── TeacherFailed      one trajectory has no log-probs from the teacher: failed, never 0
│   ├── EnvironmentFailed  an environment raised or took too long: its trajectory is failed
│   ├── Retryable          raised by a reward: a retry of the same call may succeed
│   └── TooManyFailures    rewards or engines failed more often than the config allows
├── ModelError             a model folder that streamppo cannot load or run, or an engine that fails
│   └── PromptRefused      a prompt that the engine does not take
├── UpdateError            a batch that must not be trained on, or gradients that stay non-finite
├── WeightsError           a push that does not verify: the engine keeps its version
├── CheckpointError        a checkpoint that is missing, damaged or belongs to another run
├── JournalError           a journal or an archive that is damaged or cannot be written
├── BundleError            a file that is damaged, is not a bundle, or lacks a part
├── Diverged               an update was repeated and gave other weights than the first time
├── QueueError             a request that the queue refuses
└── RunError               a stage died or stalled; the message names the stage
    ├── LearnerLost        a learner rank died; the supervisor starts all of them again
    └── Interrupted        SIGINT, SIGTERM or SIGHUP
"""

import signal

UNREADABLE = (ValueError, RecursionError)
"""Errors that msgspec raises for untrusted JSON or msgpack. UnicodeDecodeError (no UTF-8) is a ValueError."""


class StreamppoError(Exception):
    """Base class of every error that streamppo raises on purpose. Other errors are bugs.

    A command that ends with this error has the exit code `exit_code`.
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
    """The teacher's server returned no log-probs of this trajectory; the message is the reason."""


class EnvironmentFailed(TaskError):
    """The environment of this trajectory raised, took too long, or returned no usable answer.

    `tokens` is the number of tokens sampled for the trajectory, as far as it is known.
    """

    def __init__(self, reason: str = "", tokens: int = 0) -> None:
        super().__init__(reason)
        self.tokens = tokens


class Retryable(TaskError):
    """The error for a reward to raise if its call failed and a retry, not before `after_s` seconds, may succeed.

    Any exception whose attribute `retryable` is true has the same effect.
    """

    retryable = True
    after_s = 0.0

    def __init__(self, message: str = "", after_s: float = 0.0) -> None:
        super().__init__(message)
        self.after_s = float(after_s)


class TooManyFailures(TaskError):
    """More trajectories failed than `queue.max_failure_rate` allows; the message quotes the first few reasons."""


class ModelError(StreamppoError):
    """A model folder that cannot be loaded or run, or an engine that fails."""


class PromptRefused(ModelError):
    """A prompt that is empty, leaves no room for a completion, or has tokens that the model lacks."""


class UpdateError(StreamppoError):
    """A batch that must not be trained on, or gradients that stay non-finite."""


class WeightsError(StreamppoError):
    """A pushed version that is incomplete, differs from its hashes, or does not fit the engine's parameters."""


class CheckpointError(StreamppoError):
    """A checkpoint that is missing, damaged, or belongs to another run."""


class JournalError(StreamppoError):
    """A journal or an archive that is missing, damaged, or cannot be written; the message names the file."""


class BundleError(StreamppoError):
    """A file that is damaged, is not a bundle, or lacks a requested part; the message names the file."""


DIVERGENCE_CAUSES = (
    "the software, the device or the number of ranks differs, or a function of [algorithm] keeps state or draws random "
    "numbers"
)


class Diverged(StreamppoError):
    """An update was repeated from the archive and gave other weights than the first time."""


class QueueError(StreamppoError):
    """A request that the queue refuses."""


class RunError(StreamppoError):
    """A stage died or stalled."""


class LearnerLost(RunError):
    """A learner rank died; all ranks of its group must be restarted."""


class Interrupted(RunError):
    """The signal `number` stopped the run."""

    def __init__(self, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.exit_code = 128 + number
