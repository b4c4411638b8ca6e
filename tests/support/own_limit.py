"""Length limits of completions, as in a user's module."""

from streamppo.types import Identity, Prompt


def by_prompt(prompt: Prompt, identity: Identity | None) -> int:
    """1 and 10 for prompts 0 and 1, 5 in evaluations; raises ValueError for other prompts."""
    if identity is None:
        return 5
    if identity.prompt < 2:
        return (1, 10)[identity.prompt]
    raise ValueError(f"no limit for prompt {identity.prompt}")


def half(prompt: Prompt, identity: Identity | None) -> float:
    """An invalid limit: not a whole number."""
    return 0.5


def none_at_all(prompt: Prompt, identity: Identity | None) -> int:
    """An invalid limit: no token."""
    return 0
