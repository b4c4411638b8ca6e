"""Makes the warm-up data of builtin:tiny: the characters of a task, and prompts with answers. Imports no torch."""

import re
import unicodedata
from collections.abc import Sequence
from typing import NamedTuple

from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config
from streamppo.errors import TaskError
from streamppo.tasks import task as tasks
from streamppo.tasks.dataset_files import QUOTED
from streamppo.tasks.scorers import gold
from streamppo.tasks.task import Task
from streamppo.terminal import quoted
from streamppo.types import Prompt

CONTEXT = 256
"""The context length of builtin:tiny in tokens: the bound on a prompt plus its answer."""
CHARACTERS = 256
"""Maximum number of distinct characters that builtin:tiny can learn."""
SPECIAL = re.compile("<eos>")
"""The end of a turn in demonstrations of several turns: a single token of the character tokenizer."""


class Lesson(NamedTuple):
    """`problems` are prompts with answers to imitate; the longest prompt plus answer has `longest` tokens."""

    alphabet: str
    problems: Sequence[Prompt]
    longest: int


class Characters:
    """Measures prompts as the character tokenizer of builtin:tiny does."""

    def render(self, prompt: Prompt) -> str:
        if prompt.messages:
            raise TaskError(f"{BUILTIN} has no chat template: use plain text prompts, without `chat` and `system`")
        return prompt.text

    def ids(self, prompt: Prompt) -> bytes:
        """Return the bytes of a prompt: one token each. Raises `TaskError` if the prompt has messages."""
        return _bytes(self.render(prompt))


def prepare(config: Config) -> Lesson:
    """Make the warm-up data of a configuration's task. Raises `TaskError` as `warmup_of_task` does."""
    return warmup_of_task(tasks.build(config.task, config.seed, Characters()))


def warmup_of_task(task: Task) -> Lesson:
    """Make the warm-up data of a task. Raises `TaskError` for messages, answers that are not texts, and long rows."""
    measure = Characters()
    problems = [_problem(prompt, measure) for prompt in task.demonstrations]
    used: set[str] = set()
    for prompt in (*problems, *task.training, *task.held_out(None)):
        used.update(_normal(SPECIAL.sub("", measure.render(prompt)) + _answer(prompt)))
    if len(used) > CHARACTERS:
        raise TaskError(
            f"{BUILTIN} learns {CHARACTERS} different characters at most, and the prompts and answers have "
            f"{len(used)}: name a model that has them (model.path)"
        )
    if any("\ud800" <= character <= "\udfff" for character in used):
        raise TaskError(f"{BUILTIN}: a prompt or an answer has half of a surrogate pair, which is not a character")
    alphabet = "".join(sorted(used, key=lambda character: (not character.isalnum(), character)))
    return Lesson(alphabet, problems, max(map(_length, problems)))


def _problem(prompt: Prompt, measure: Characters) -> Prompt:
    text = measure.render(prompt)
    if prompt.max_tokens is not None:
        text = text[-prompt.max_tokens :]
    if not (answer := _answer(prompt)):
        raise TaskError(
            f"{BUILTIN} learns only from answers that are texts or numbers: the answer of the prompt {quoted(text)} is "
            f"{prompt.columns.get('answer')!r:.{QUOTED}}"
        )
    problem = Prompt(text=text, columns={"answer": answer})
    if (length := _length(problem)) > CONTEXT:
        raise TaskError(
            f"{BUILTIN} reads {CONTEXT} characters at once (one that is not ASCII counts as two to four): the prompt "
            f"{quoted(text)} has {length} with its answer; lower max_prompt_tokens, or name another model (model.path)"
        )
    return problem


def _length(problem: Prompt) -> int:
    """Count the tokens of a prompt and its answer, with the end-of-sequence token."""
    return len(_bytes(SPECIAL.sub(".", problem.text) + _answer(problem))) + 1


def _bytes(text: str) -> bytes:
    return _normal(text).encode(errors="surrogatepass")


def _normal(text: str) -> str:
    """Normalise to NFC, as the tokenizer does."""
    return unicodedata.normalize("NFC", text)


def _answer(prompt: Prompt) -> str:
    return gold.completion(prompt.columns.get("answer"))
