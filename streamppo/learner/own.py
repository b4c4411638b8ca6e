"""Functions that users bring to the mathematics of an update, by name."""

from collections.abc import Callable

from streamppo.tasks import plugins


def tried(name: str, field: str, try_it: Callable[[Callable[..., object]], None]) -> Callable[..., object]:
    """Import a user's function and try it. Raises `TaskError` for one that cannot teach."""
    function = plugins.function(name, field)
    plugins.call(f"{field} {name!r}", try_it, function)
    return function
