"""Play addition with a second chance: an environment of two turns.

prompt       12+34=
policy       47          wrong: the environment repeats the question after a +
environment  +12+34=
policy       46          right at the second attempt: half the reward
"""

from streamppo.tasks.environments import Done, Observation
from streamppo.types import Prompt


class SecondChance:
    """Plays one trajectory; the component `first` is 1 if the first answer was right, else 0."""

    def __init__(self, second_reward: float = 0.5) -> None:
        self.second_reward = second_reward
        self.question = self.answer = ""
        self.turn = 0

    async def reset(self, prompt: Prompt) -> str:
        """Return the question."""
        self.question, self.answer = prompt.text, prompt.columns["answer"]
        return self.question

    async def step(self, text: str) -> Observation | Done:
        """End after a right answer or the second wrong one; otherwise repeat the question."""
        self.turn += 1
        if text == self.answer:
            first = self.turn == 1
            return Done(1.0 if first else self.second_reward, {"first": float(first)})
        if self.turn == 2:
            return Done(0.0, {"first": 0.0})
        return Observation(f"+{self.question}")
