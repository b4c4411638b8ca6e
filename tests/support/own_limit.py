"""Limits of completions, as a user would write them."""

from streamppo.types import Identity, Prompt


def by_prompt(prompt: Prompt, identity: Identity | None) -> int:
    """1 and 10 for prompts 0 and 1, 5 for an evaluation's answer; raises for others."""
    if identity is None:
        return 5
    if identity.prompt < 2:
        return (1, 10)[identity.prompt]
    raise ValueError(f"no limit for prompt {identity.prompt}")


def half(prompt: Prompt, identity: Identity | None) -> float:
    """No whole number."""
    return 0.5


def none_at_all(prompt: Prompt, identity: Identity | None) -> int:
    """No token."""
    return 0
