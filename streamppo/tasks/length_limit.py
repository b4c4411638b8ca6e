"""A token limit for each completion, by a user's function: `rollout.limit`.

    def limit(prompt: Prompt, identity: Identity | None) -> int      None for an evaluation's greedy answer

It is called in the rollout actor's event loop, once for each trajectory, so it must be fast. It may return a limit by
source or difficulty, or a random one: seeded by `identity`, a retried trajectory gets the same limit again.
"""

from collections.abc import Callable
from operator import index
from typing import SupportsIndex, TypeAlias, cast

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.types import Identity, Prompt

Limit: TypeAlias = Callable[[Prompt, Identity | None], int]


def load(name: str, most: int) -> Limit:
    """Load the function `name`; its limits are capped at `most` tokens. Without a name every limit is `most`.

    Raises `TaskError` if it cannot be loaded. The returned function raises it if the user's raises, or returns anything
    but an integer above 0.
    """
    if not name:
        return lambda prompt, identity: most
    # `index` below rejects an answer that is not an integer.
    user_limit = cast(Callable[[Prompt, Identity | None], SupportsIndex], plugins.function(name, "rollout.limit"))

    def limit(prompt: Prompt, identity: Identity | None) -> int:
        tokens = plugins.call(f"rollout.limit {name!r}", lambda: index(user_limit(prompt, identity)))
        if tokens < 1:
            raise TaskError(f"rollout.limit {name!r} gave {tokens}, and a completion has at least 1 token")
        return min(tokens, most)

    return limit
