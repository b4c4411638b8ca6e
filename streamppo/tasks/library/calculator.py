"""Addition with a calculator: the example of an environment with a tool.

prompt       12+34=
the policy   46          an answer ends the trajectory: reward 1 if it is correct
             =           a call: the calculator computes the question, or the sum before the =
then         46=         the calculator shows the sum; the policy has another turn
"""

from collections.abc import Sequence

from streamppo.tasks.environments import Done, Observation
from streamppo.tasks.scorers import gold
from streamppo.types import Prompt

CALLS_OF = 5
"""One of this many demonstrations begins with a call of the calculator."""


class Calculator:
    """The environment of one trajectory. The reward component `tool` is 1 if the policy used the calculator, else 0."""

    def __init__(self) -> None:
        self._calls = 0
        self._question = self._answer = ""

    async def reset(self, prompt: Prompt) -> str:
        self._question = prompt.text.removesuffix("=")
        self._answer = gold.text(prompt.columns.get("answer"))
        return prompt.text

    async def step(self, text: str) -> Observation | Done:
        if text.endswith("="):
            self._calls += 1
            numbers = (text[:-1] or self._question).split("+")
            shown = sum(map(int, numbers)) if all(number.isdigit() for number in numbers) else "+"
            return Observation(f"{shown}=")
        right = float(text == self._answer)
        return Done(right, {"tool": float(self._calls > 0), "right": right})


def demonstrations(problems: Sequence[Prompt]) -> Sequence[Prompt]:
    """Make prompts with answers for the warm-up: correct answers, some calls, and the answer after a call."""
    prompts: list[Prompt] = []
    for number, problem in enumerate(problems):
        answer = problem.columns["answer"]
        first = "=" if number % CALLS_OF == 0 else answer
        prompts.append(Prompt(text=problem.text, columns={"answer": first}))
        prompts.append(Prompt(text=f"{problem.text}=<eos>{answer}=", columns={"answer": answer}))
    return prompts
