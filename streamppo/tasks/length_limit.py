"""A limit of its own for each completion, by a function of the user's: `rollout.limit`.

    def limit(prompt: Prompt, identity: Identity | None) -> int      None for an evaluation's greedy answer

It is called in the rollout actor's event loop, once for each trajectory, so it must be quick. It may give each source
or difficulty its own length, or draw one: `identity` names the trajectory, which gets the same length again.
"""

from collections.abc import Callable
from operator import index
from typing import SupportsIndex, TypeAlias, cast

from streamppo.errors import TaskError
from streamppo.tasks import plugins
from streamppo.types import Identity, Prompt

Limit: TypeAlias = Callable[[Prompt, Identity | None], int]


def load(name: str, most: int) -> Limit:
    """Load the function called `name`; none is beyond `most` tokens, and without a name all are `most`.

    Raises `TaskError` if it cannot be loaded. The limit raises it for a function that raises, or gives no whole number
    above 0.
    """
    if not name:
        return lambda prompt, identity: most
    # An answer that is no number is found out below.
    given = cast(Callable[[Prompt, Identity | None], SupportsIndex], plugins.function(name, "rollout.limit"))

    def limit(prompt: Prompt, identity: Identity | None) -> int:
        tokens = plugins.call(f"rollout.limit {name!r}", lambda: index(given(prompt, identity)))
        if tokens < 1:
            raise TaskError(f"rollout.limit {name!r} gave {tokens}, and a completion has at least 1 token")
        return min(tokens, most)

    return limit
