"""The `origin` part of the configuration: the run that a fork was made of."""

from streamppo.config.base import Count, Section


class Origin(Section, frozen=True):
    """The version of another run that a fork begins as; `streamppo fork` writes it, and a run does not read it."""

    run: str
    """The folder of that run, as it was when the fork was made."""
    version: Count
    """The version that both have in common; the fork's first update makes the next one."""
    digest: str
    """The hash of that version's weights in the journals of both."""
