"""An environment of three turns, whatever the policy says; what it says depends on all of them."""

from streamppo.tasks.environments import Done, Observation
from streamppo.types import Prompt


class ThreeTurns:
    """Says how many characters it has heard; the reward is of the last turn."""

    def __init__(self) -> None:
        self._heard: list[str] = []

    async def reset(self, prompt: Prompt) -> str:
        """Show the question."""
        return prompt.text

    async def step(self, text: str) -> Observation | Done:
        """Count, and end with the third turn."""
        self._heard.append(text)
        if len(self._heard) == 3:
            return Done(len(set(text)) / 5)
        return Observation(f"{sum(map(len, self._heard))}=", reward=0.125)
