"""The `origin` part of the configuration: the run that a fork was made of."""

from streamppo.config.base import Count, Section


class Origin(Section, frozen=True):
    """The version of another run from which a fork begins; `streamppo fork` writes it, and a run does not read it."""

    run: str
    """The folder of the run that was forked."""
    version: Count
    """The last version that both have."""
    digest: str
    """The hash of its weights."""
