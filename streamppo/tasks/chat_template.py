"""The chat template of a tokenizer: messages to text, and the token that ends an assistant's turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from streamppo.errors import TaskError
from streamppo.tasks.control_tokens import ControlTokens
from streamppo.types import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL = "qk7vAssistantTurn"
"""An assistant's text to find in a rendered conversation; it occurs in no template."""
PLAIN = Template()
"""No arguments and no tools."""
RESERVED = {
    *("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
}
"""Arguments of transformers' `apply_chat_template` that a configuration may not set."""
FAULTS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Errors of a template, and of transformers for an invalid chat."""


class ChatTemplate:
    """Renders messages by the chat template of `tokenizer`; a template that writes the time writes `clock`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens, clock: str) -> None:
        self._tokenizer = tokenizer
        self._control = control
        # Overrides transformers' `strftime_now`, which returns the time of the call.
        self._clock: dict[str, Callable[[str], str]] = (
            {"strftime_now": datetime.fromisoformat(clock).strftime} if clock else {}
        )

    def render(self, messages: Sequence[Message], template: Template) -> str:
        """Render a prompt with the opening of the answer; a final assistant message is left open instead.

        Names of control tokens in the messages are escaped, see `ControlTokens`. Raises `TaskError` without a template,
        or if it rejects the messages.
        """
        continues = bool(messages) and messages[-1].role == "assistant"
        if continues and not messages[-1].content:
            raise TaskError("the prompt ends with an assistant's message without content, which has nothing to go on")
        return self._apply(messages, template, add_generation_prompt=not continues, continue_final_message=continues)

    def render_conversation(self, messages: Sequence[Message], template: Template) -> str:
        """Render a finished conversation. Raises `TaskError` as `render` does."""
        return self._apply(messages, template, add_generation_prompt=False)

    def after_turn(self, said: Sequence[Message], template: Template) -> str:
        """Render `said` after an assistant's turn: the text after the turn's content, with the next turn's opening.

        Without `said` it is only the end of the turn. Raises `TaskError` as `render` does, and for a template that does
        not write the assistant's content exactly once.
        """
        turn = (Message(role="user", content="?"), Message(role="assistant", content=SENTINEL))
        rendered = self.render((*turn, *said), template) if said else self.render_conversation(turn, template)
        behind = rendered.split(SENTINEL)[1:]
        if len(behind) != 1:
            raise TaskError(
                f"the chat template rewrites earlier turns: it writes an assistant's words {len(behind)} times where "
                "messages follow, so an environment's messages cannot be appended"
            )
        return behind[0]

    def _apply(self, messages: Sequence[Message], template: Template, **how: bool) -> str:
        if not self._tokenizer.chat_template:
            raise TaskError("the prompts are messages, but the model's tokenizer has no chat template")
        if wrong := RESERVED & template.arguments.keys():
            raise TaskError(f"{min(wrong)!r} is no argument of a chat template: it is not the configuration's to give")
        chat: Any = [message.plain() for message in messages]
        # Templates would treat an empty list as tools.
        tools = list(template.tools) or None
        arguments = {**self._clock, **template.arguments, **how}
        rendered = self._render_checked(chat, tools, arguments)
        if template.control_tokens == "parse":
            return rendered
        escaped = [self._control.escape(message, str(message["role"])) for message in chat]
        escaped_tools = self._control.escape(tools, "tool")
        if (escaped, escaped_tools) == (chat, tools):
            return rendered
        private = self._render_checked(escaped, escaped_tools, arguments)
        if self._control.restore(private) != rendered:
            raise TaskError(
                "the chat template changes, cuts or looks for a text that spells a control token, so it cannot be kept "
                'as text: take it out of the row, or choose control_tokens = "parse"'
            )
        return private

    def _render_checked(self, chat: Any, tools: Any, given: dict[str, Any]) -> str:
        try:
            return str(self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **given))
        except FAULTS as error:
            raise TaskError(f"the chat template refuses the messages: {error}") from error


def sources(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of a tokenizer's chat templates: none, one, or several named ones."""
    templates: object = tokenizer.chat_template
    if isinstance(templates, Mapping):
        return [str(text) for text in templates.values()]
    return [str(templates)] if templates else []
