"""Users' own functions in an update (loss, advantage, correction), by name."""

from collections.abc import Callable

from streamppo.tasks import plugins


def load_and_try(name: str, field: str, try_it: Callable[[Callable[..., object]], None]) -> Callable[..., object]:
    """Import a user's function and try it. Raises `TaskError` if it fails."""
    function = plugins.function(name, field)
    plugins.call(f"{field} {name!r}", try_it, function)
    return function
