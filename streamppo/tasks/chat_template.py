"""Renders messages by a tokenizer's chat template, and finds the text that follows an assistant's turn."""

from __future__ import annotations

import logging
import string
import textwrap
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from jinja2 import TemplateError
from msgspec import structs

from streamppo.errors import TaskError
from streamppo.tasks.chat_forms import other_forms, parts
from streamppo.tasks.control_tokens import ControlTokens
from streamppo.types import Message, Template

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINEL = "qk7vAssistantTurn"
"""Placeholder for an assistant's text, searched in the rendered conversation. No template contains it."""
WORDS = "qk7vWords"
"""Placeholder for the text of any other message, to check that a template writes the message."""
PLAIN = Template()
FIRST = (Message(role="user", content="?"),)
"""The conversation before a first turn."""
CALL_ID = "qk7vCalls"
"""The id of a call. Mistral's templates accept only nine letters or digits."""
EARLIER = (
    FIRST,
    (*FIRST, Message(role="assistant", content="!"), *FIRST),
    (
        *FIRST,
        Message(
            role="assistant",
            content="",
            tool_calls=({"id": CALL_ID, "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},),
        ),
        Message(role="tool", content="1", tool_call_id=CALL_ID, name="f"),
        Message(role="assistant", content="!"),
        *FIRST,
    ),
)
"""Conversations before a turn: the first turn, the second, and one after a call."""
RESERVED = {
    *("conversation", "messages", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    # `ControlTokens` escapes the names of control tokens instead.
    "sanitize_control_tokens",
}
"""Arguments of transformers' `apply_chat_template` that a configuration may not set."""
NOW = "strftime_now"
"""Name of the function in chat templates that formats the present time, as `strftime` does."""
CLOCK = (
    "{%- macro " + NOW + "(format) %}{% set written = namespace(text=format.replace('%%', '\\0')) %}"
    "{% for directive, text in streamppo_clock.items() %}"
    "{% set written.text = written.text.replace(directive, text) %}"
    "{% endfor %}{{ written.text.replace('\\0', '%') }}{% endmacro +%}"
)
"""A macro `NOW` that writes a fixed time: newer versions of transformers pass no functions to templates."""
COMPILED = "<template>"
"""The file of a template's code, for Python's tracebacks."""
QUOTED_LINE = 120
"""Maximum number of characters of a template's line in a message."""
Table: TypeAlias = dict[str, Any]
Calls: TypeAlias = Sequence[Mapping[str, Any]]
FAULTS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError)
"""Errors that a template raises, and that transformers raises for an invalid chat."""

log = logging.getLogger(__name__)


class AfterTurn(NamedTuple):
    """The rendered `text` after an assistant's words, or after the last argument of its calls.

    After calls, `others` are the texts that the template writes at the same place if no message follows, and if a
    user's message follows. The common beginning of all texts ends the calls and the turn. `again` is the text between
    two calls, if the template can write two: it begins with the end of the first call.
    """

    text: str
    others: tuple[str, ...] = ()
    again: str | None = None


class ChatTemplate:
    """Renders messages by the chat template of `tokenizer`. `clock` replaces the present time, unless it is empty."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: ControlTokens, clock: str) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._complete_shapes = set[tuple[object, ...]]()
        """Shapes (`_message_shape`) of messages that the template writes completely."""
        self._counting_shapes = dict[tuple[object, ...], bool]()
        """Results of `_counts_turns` by shape."""
        self._toolless_shapes = dict[tuple[object, ...], bool]()
        """Results of `leaves_out_tools` by shape."""
        self._lists_parts = dict[tuple[str, str], bool]()
        """Results of `_needs_parts` by role and by the argument that replaces the chat template ("": none does)."""
        self._clock = _directives(datetime.fromisoformat(clock)) if clock else {}

    def render(self, messages: Sequence[Message], template: Template) -> str:
        """Render a prompt and the opening of the answer. A last message of the assistant is left open, to be continued.

        Names of control tokens in the messages are escaped (`ControlTokens`). Raises `TaskError` if there is no
        template, or if the template rejects the messages or leaves out one of them.
        """
        rendered = self._render_open(messages, template)
        shape = (*map(_message_shape, messages), *_template_shape(template))
        if shape not in self._complete_shapes:
            self._refuse_omissions(messages, template)
            self._complete_shapes.add(shape)
        return rendered

    def leaves_out_tools(self, messages: Sequence[Message], template: Template) -> bool:
        if not template.tools:
            return False
        shape = (*map(_message_shape, messages), *_template_shape(template))
        if shape not in self._toolless_shapes:
            without = structs.replace(template, tools=())
            self._toolless_shapes[shape] = self._render_open(messages, template) == self._render_open(messages, without)
        return self._toolless_shapes[shape]

    def _refuse_omissions(self, messages: Sequence[Message], template: Template) -> None:
        self._refuse_omitted_calls(messages, template)
        words = {number: f"{WORDS}{number}z" for number, message in enumerate(messages) if message.role != "assistant"}
        probe = [
            structs.replace(message, content=words[number]) if number in words else message
            for number, message in enumerate(messages)
        ]
        try:
            rendered = self._render_open(probe, template)
        except TaskError as error:
            log.debug("the chat template rejects placeholders for the words: %s", error)
            return
        for number, word in words.items():
            role = messages[number].role
            if messages[number].text.strip() and word not in rendered:
                raise TaskError(
                    f"the chat template leaves out a message of the role {role!r}: the policy would not see it; "
                    "put its words into the user's message, or give the tokenizer another template"
                )

    def _refuse_omitted_calls(self, messages: Sequence[Message], template: Template) -> None:
        """Raise `TaskError` for a message with calls if the template writes no calls even where an answer follows."""
        call = next((call for message in messages for call in message.tool_calls), None)
        if call is None:
            return
        text, turn = "", (*FIRST, Message(role="assistant", content=None, tool_calls=(_with_sentinel(call),)))
        for answers in ((), (Message(role="tool", content=WORDS, tool_call_id=call.get("id")),)):
            with suppress(TaskError):
                text += self.render_conversation((*turn, *answers), template)
        if text and SENTINEL not in text:
            raise TaskError(
                "the chat template leaves out the calls of an assistant's message: the policy would not see them; "
                "write them into the message's content, or give the tokenizer another template"
            )

    def _render_open(self, messages: Sequence[Message], template: Template) -> str:
        continues = bool(messages) and messages[-1].role == "assistant"
        if continues and not messages[-1].content:
            raise TaskError("the prompt ends with an assistant's message without content: there is nothing to continue")
        return self._apply(messages, template, add_generation_prompt=not continues, continue_final_message=continues)

    def render_conversation(self, messages: Sequence[Message], template: Template) -> str:
        """Render a finished conversation. Raises `TaskError` for a missing template, and for rejected messages."""
        return self._apply(messages, template, add_generation_prompt=False)

    def missing_opening(self) -> str:
        """Return the opening of an answer that rendered prompts lack, such as "<|im_start|>assistant"; "" if none."""
        question = (Message(role="user", content="?"),)
        try:
            prompt, ended = self._render_open(question, PLAIN), self.render_conversation(question, PLAIN)
            turn = self.render_conversation((*question, Message(role="assistant", content=SENTINEL)), PLAIN)
        except TaskError as error:
            log.debug("the chat template writes no plain turn: %s", error)
            return ""
        before, sentinel, _ = turn.partition(SENTINEL)
        opening = before.removeprefix(prompt)
        is_missing = sentinel and prompt == ended and before.startswith(prompt) and opening.strip()
        return opening if is_missing else ""

    def after_turn(
        self, said: Sequence[Message], template: Template, calls: Calls = (), before: Sequence[Message] = ()
    ) -> AfterTurn:
        """Return the text after an assistant's words: the turn's end, the messages `said`, the next turn's opening.

        `calls` are the calls at the end of the turn: some templates write the answers of tools only after calls.
        `before` are the messages before the turn: some templates count turns or calls. If `said` is empty, the text is
        only the end of the turn. Raises `TaskError` as `render` does, and if the template does not write the
        assistant's words exactly once.
        """
        shape = (tuple(map(_message_shape, said)), bool(calls), *_template_shape(template))
        after = self._after_words(said, template, calls)
        if before and self._counts_turns(said, template, calls, shape):
            with suppress(TaskError):
                after = self._after_words(said, template, calls, before)
        if shape not in self._complete_shapes:
            self._refuse_omitted_calls(said, template)
            words = [structs.replace(message, content=f"{WORDS}{number}z") for number, message in enumerate(said)]
            probe = self._after_words(words, template, calls).text
            for number, message in enumerate(said):
                if message.role in ("user", "tool") and message.text.strip() and f"{WORDS}{number}z" not in probe:
                    raise TaskError(
                        f"the chat template leaves out a message of the role {message.role!r} that follows the "
                        f"assistant's turn{' with its calls' if calls else ''}: the policy would not see it"
                    )
            self._complete_shapes.add(shape)
        return after

    def _counts_turns(
        self, said: Sequence[Message], template: Template, calls: Calls, shape: tuple[object, ...]
    ) -> bool:
        """Return True if the text after a turn depends on the messages before the turn.

        Examples: the calls of a conversation are numbered (Command R7B), or only the first answer of a tool gets a
        heading (DeepSeek R1).
        """
        if shape not in self._counting_shapes:
            texts = set[str]()
            for before in EARLIER:
                with suppress(TaskError):
                    texts.add(self._after_words(said, template, calls, before).text)
            self._counting_shapes[shape] = len(texts) > 1
        return self._counting_shapes[shape]

    def _after_words(
        self, said: Sequence[Message], template: Template, calls: Calls, before: Sequence[Message] = FIRST
    ) -> AfterTurn:
        refusal: TaskError | None = None
        if said and calls:
            try:
                if (after := self._after_calls(said, template, calls, before)) is not None:
                    return after
            except TaskError as error:
                refusal = error
        try:
            return self._after_message(said, template, before)
        except TaskError as error:
            raise refusal or error from None

    def _after_message(self, said: Sequence[Message], template: Template, before: Sequence[Message]) -> AfterTurn:
        """Return the result of `after_turn` for a turn without calls."""
        turn = (*before, Message(role="assistant", content=SENTINEL))
        rendered = self._render_open((*turn, *said), template) if said else self.render_conversation(turn, template)
        suffixes = rendered.split(SENTINEL)[1:]
        if len(suffixes) != 1:
            raise TaskError(
                f"the chat template rewrites earlier turns: it writes an assistant's words {len(suffixes)} times where "
                "messages follow, so an environment's messages cannot be appended"
            )
        return AfterTurn(suffixes[0])

    def _after_calls(
        self, said: Sequence[Message], template: Template, calls: Calls, before: Sequence[Message]
    ) -> AfterTurn | None:
        """Return the result of `after_turn` for a turn with `calls`; None if their arguments are not written."""

        def turn(*calls_made: Table) -> tuple[Message, ...]:
            return *before, Message(role="assistant", content=None, tool_calls=calls_made)

        conversation = turn(*map(_with_sentinel, calls))
        _, sentinel, suffix = self._render_open((*conversation, *said), template).rpartition(SENTINEL)
        if not sentinel:
            return None
        others, second_call = [self.render_conversation(conversation, template).rpartition(SENTINEL)[2]], None
        # Many templates reject a user's message after calls, or a second call, or leave out calls before a question.
        with suppress(TaskError):
            _, sentinel, text = self._render_open((*conversation, *FIRST), template).rpartition(SENTINEL)
            others += [text] if sentinel else []
        with suppress(TaskError, IndexError):
            second_call = self.render_conversation(turn(*[_with_sentinel(calls[-1])] * 2), template).split(SENTINEL)[1]
        return AfterTurn(suffix, tuple(others), second_call)

    def _apply(self, messages: Sequence[Message], template: Template, **flags: bool) -> str:
        if not self._tokenizer.chat_template:
            raise TaskError("the model's tokenizer has no chat template, which messages need: use plain texts")
        if reserved := RESERVED & template.arguments.keys():
            raise TaskError(f"{min(reserved)!r} is not an argument that the configuration may give to a chat template")
        self._refuse_choice(template)
        chat: Any = [message.plain() for message in messages]
        for message in chat:
            if self._needs_parts(str(message["role"]), template):
                message["content"] = parts(message["content"])
        # Templates would treat an empty list as tools.
        tools = list(template.tools) or None
        arguments = {**self._timed(template, tools), **flags}
        rendered = self._render_checked(chat, tools, arguments)
        if template.control_tokens == "parse":
            return rendered
        escaped = [self._control.escape(message, str(message["role"])) for message in chat]
        escaped_tools = self._control.escape(tools, "tool")
        # Arguments may come from a row, so they are escaped too, except the chat template itself.
        row_arguments = {name: value for name, value in template.arguments.items() if name != "chat_template"}
        escaped_arguments = {**arguments, **self._control.escape(row_arguments, "tool")}
        if (escaped, escaped_tools, escaped_arguments) == (chat, tools, arguments):
            return rendered
        private = self._render_checked(escaped, escaped_tools, escaped_arguments)
        if self._control.restore(private) != rendered:
            raise TaskError(
                "the chat template changes, cuts or searches a text that spells a control token, so the name cannot "
                'stay text: remove it from the row, or choose control_tokens = "parse"'
            )
        return private

    def _needs_parts(self, role: str, template: Template) -> bool:
        """Return True if the chat template writes a content of `role` only as a list of parts, as multimodal ones may.

        If the template writes neither form, because a single message of the role is invalid, a user's message decides.
        """
        key = role, str(template.arguments.get("chat_template", ""))
        if key not in self._lists_parts:
            arguments = self._timed(template, None)

            def writes(content: object) -> bool:
                with suppress(*FAULTS):
                    return WORDS in self._apply_template([{"role": role, "content": content}], None, arguments)
                return False

            is_text, is_parts = writes(WORDS), writes(parts(WORDS))
            is_unknown = role != "user" and not is_text and not is_parts
            self._lists_parts[key] = self._needs_parts("user", template) if is_unknown else is_parts and not is_text
        return self._lists_parts[key]

    def _timed(self, template: Template, tools: list[Table] | None) -> Table:
        """Return the arguments of `template`, with those that fix the time to `clock` if the template calls `NOW`."""
        text = self._tokenizer.get_chat_template(template.arguments.get("chat_template"), tools) if self._clock else ""
        if NOW not in text:
            return template.arguments
        return {**template.arguments, "chat_template": CLOCK + text, "streamppo_clock": self._clock}

    def _refuse_choice(self, template: Template) -> None:
        named: object = self._tokenizer.chat_template
        if not isinstance(named, dict) or "chat_template" in template.arguments:
            return
        if "default" not in named and not (template.tools and "tool_use" in named):
            raise TaskError(
                f"the tokenizer has only the named chat templates {', '.join(map(repr, sorted(named)))}: copy the "
                "one for these prompts to chat_template.jinja in the model's folder"
            )

    def _render_checked(self, chat: Any, tools: Any, arguments: Table) -> str:
        refusal = Exception()
        for form in chain((chat,), other_forms(chat)):
            try:
                return self._apply_template(form, tools, arguments)
            except FAULTS as error:
                refusal = error
        place = self._place(refusal, tools, arguments)
        raise TaskError(f"the chat template refuses the messages: {refusal}{place}") from refusal

    def _place(self, error: Exception, tools: list[dict[str, object]] | None, arguments: Mapping[str, str]) -> str:
        """Return the line of the chat template at which `error` was raised. Example: " (line 2: {{ x.y }})"."""
        frames = traceback.walk_tb(error.__traceback__)
        numbers = [line for frame, line in frames if frame.f_code.co_filename == COMPILED]
        number = numbers[-1] if numbers else getattr(error, "lineno", None)
        if number is None:
            return ""
        lines = self._tokenizer.get_chat_template(arguments.get("chat_template"), tools).splitlines()
        line = textwrap.shorten("".join(lines[number - 1 : number]), QUOTED_LINE, placeholder=" ...")
        return f" (line {number}: {line})"

    def _apply_template(self, chat: Any, tools: Any, arguments: Table) -> str:
        return str(self._tokenizer.apply_chat_template(chat, tools=tools, tokenize=False, **arguments))


def _directives(moment: datetime) -> dict[str, str]:
    """Return the text of every directive of `strftime`. Example: {"%d": "07", "%-d": "7", "%B": "March", ...}."""
    every = (f"%{flag}{letter}" for letter in string.ascii_letters for flag in ("-", ""))
    return {directive: text for directive in every if (text := moment.strftime(directive)) != directive}


def _message_shape(message: Message) -> tuple[object, ...]:
    """Return the properties of a message, except its words, on which a template may depend."""
    presence = bool(message.text.strip()), bool(message.tool_calls), bool(message.tool_call_id), bool(message.name)
    return message.role, *presence, *sorted(message.fields)


def _template_shape(template: Template) -> tuple[object, ...]:
    return bool(template.tools), repr(template.arguments)


def _with_sentinel(call: Mapping[str, Any]) -> Table:
    function = {**call.get("function", {}), "arguments": {"value": SENTINEL}}
    return {"type": "function", **call, "function": function}


def sources(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the texts of a tokenizer's chat templates: none, one, or several named ones."""
    templates: object = tokenizer.chat_template
    if isinstance(templates, Mapping):
        return [str(text) for text in templates.values()]
    return [str(templates)] if templates else []
