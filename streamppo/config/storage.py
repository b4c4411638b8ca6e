"""What a run keeps on disk: checkpoints, and the batches that it has trained on."""

from streamppo.config.base import Count, Positive, Section


class Checkpoint(Section, frozen=True):
    """State on disk to resume from."""

    every: Count = 50
    """Updates between two checkpoints; 0: only the last one."""
    keep: Positive = 2
    """Newest checkpoints kept on disk."""
    keep_every: Count = 0
    """Versions divisible by this keep their checkpoint; 0 is off."""
    remote: str = ""
    """An fsspec address (s3://bucket/runs) for copies."""


class Archive(Section, frozen=True):
    """Trained batches on disk."""

    keep: Count = 0
    """Newest batches that are kept, besides all after the oldest checkpoint; 0 is all."""
    numbers: bool = True
    """Store each token's learner's log-prob and advantage, for `watch` and `inspect`."""
