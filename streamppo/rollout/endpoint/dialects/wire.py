"""The common part of the dialects: readers of a request's fields, and the protocol of a dialect."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from streamppo.rollout.endpoint import json_values
from streamppo.rollout.endpoint.reply import Reply
from streamppo.rollout.endpoint.request import Request, RequestRefused, Turn, malformed
from streamppo.tasks.chat import PARTS
from streamppo.types import JsonObject

MODEL = "policy"
SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed"),
    *("min_tokens", "ignore_eos"),
)
"""The run sets these parameters. If a request has one, it is counted and ignored."""
FORMATS = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("response_format", "json_schema", "regex", "ebnf", "output_format"),
)
"""Parameters that ask for a grammar. The parameters `FORMATS_IN` may have a field `format` that asks for one too."""
FORMATS_IN = ("text", "output_config")
FORMAT = (
    "the policy is sampled without a grammar. Ask for the form in the messages and reward it; with "
    'environment.ignored = ["response_format"] the request is answered all the same'
)
CHOICE = (
    "the policy chooses by itself whether it calls a tool, and which. Reward it; with environment.ignored = "
    '["tool_choice"] the request is answered all the same'
)
CHOICES = (None, "auto", "none")
PLAIN_TEXT = {"type": "text"}
LOGPROBS = "they are stored with the run's trajectories"
ABSENT = {
    **dict.fromkeys(FORMATS, FORMAT),
    **dict.fromkeys(("logprobs", "top_logprobs", "prompt_logprobs"), LOGPROBS),
    "stop_token_ids": "write the strings of these tokens in stop",
    **dict.fromkeys(("functions", "function_call"), "describe functions as tools"),
    **dict.fromkeys(("logit_bias", "allowed_token_ids"), "the policy's own probabilities are trained"),
    **dict.fromkeys(("audio", "image"), "the policy reads and writes text"),
    **dict.fromkeys(("web_search_options", "mcp_servers", "container"), "tools are the program's: describe them"),
    "prompt": "nothing is stored outside this run: send the messages",
}
"""Parameters of any dialect or server that would change the answer, each with the reason for its refusal."""
KNOWN = {
    *ABSENT,
    *SAMPLING,
    *("model", "messages", "input", "instructions", "system", "previous_response_id", "tools", "tool_choice"),
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "stop", "stop_sequences", "chat_template_kwargs"),
    *("stream", "stream_options", "n", "best_of", "modalities", "text", "output_config", "background", "conversation"),
    # These parameters do not change an answer.
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("include", "cache_control", "parallel_tool_calls", "prediction"),
}
Body = Mapping[str, Any]


class Stream(Protocol):
    """Writes the events of one turn: its beginning, each new text, and its end with the remaining text."""

    def begin(self) -> bytes: ...

    def extend(self, partial: Reply) -> bytes: ...

    def end(self, turn: Turn) -> bytes: ...


class Dialect(Protocol):
    """Reads requests (raises `RequestRefused`), and writes answers, streams and refusals."""

    keep_alive: bytes

    def read(self, body: Body) -> Request: ...

    def complete(self, turns: Sequence[Turn], model: str) -> Body:
        """Write the answer to a request, which has one ended turn for each of its `answers`."""
        ...

    def stream(self, turn: Turn, model: str, body: Body) -> Stream: ...

    def error(self, error: RequestRefused) -> Body: ...


def without(body: Body, ignored: Sequence[str]) -> tuple[Body, tuple[str, ...]]:
    """Return a request without the parameters `ignored` (environment.ignored), and the names of the removed ones."""
    names = list[str]()
    request = dict(body)
    if "response_format" in ignored:
        names += [name for name in FORMATS if request.pop(name, None)]
        for place in FORMATS_IN:
            inner = request.get(place)
            if isinstance(inner, dict) and (form := inner.get("format")) not in (None, PLAIN_TEXT):
                request[place] = {**inner, "format": None}
                names += [f"{place}.format"] if form else []
    if "tool_choice" in ignored and choice(body) not in CHOICES:
        names.append("tool_choice")
        del request["tool_choice"]
    if "tools" in ignored and request.pop("tools", None):
        names.append("tools")
    return request, tuple(names)


def choice(body: Body) -> object:
    """Return the kind of choice that a request's `tool_choice` asks for, in any dialect."""
    value = body.get("tool_choice")
    return value.get("type") if isinstance(value, dict) else value


def refuse_absent(body: Body) -> None:
    """Raise `RequestRefused` for a request with a parameter that no dialect here supports."""
    for name, why in ABSENT.items():
        refuse(body, name, why, PLAIN_TEXT)
    for place in FORMATS_IN:
        if isinstance(body.get(place), dict):
            refuse(body[place], "format", FORMAT, PLAIN_TEXT, label=f"{place}.format")
    if choice(body) not in CHOICES:
        raise malformed(f"tool_choice is not possible here: {CHOICE}", "unusable parameter")
    if body.get("modalities") not in (None, [], ["text"]):
        raise malformed("modalities is not possible here: the policy reads and writes text", "unusable parameter")


def refuse(body: Body, name: str, why: str, *allowed: object, label: str = "") -> None:
    """Raise `RequestRefused` unless the parameter `name` of a request is empty, null, false or one of `allowed`."""
    value = body.get(name)
    if value not in (None, [], {}, False, *allowed):
        raise malformed(f"{label or name} is not possible here: {why}", "unusable parameter")


def sampling_of(body: Body) -> tuple[str, ...]:
    """Name the sampling parameters of a request."""
    serial_calls = ("parallel_tool_calls",) if body.get("parallel_tool_calls") is False else ()
    return (*(name for name in SAMPLING if body.get(name) is not None), *serial_calls)


def unknown(body: Body) -> tuple[str, ...]:
    """Name the parameters of a request that the endpoint does not know."""
    return tuple(name for name, value in body.items() if name not in KNOWN and value not in (None, [], {}, False))


def stops(body: Body, name: str) -> tuple[str, ...]:
    """Return the stop strings of a request. Raises `RequestRefused` unless they are non-empty texts."""
    value = body.get(name) or ()
    strings = (value,) if isinstance(value, str) else value
    if not isinstance(strings, list | tuple) or not all(isinstance(string, str) and string for string in strings):
        raise malformed(f"{name} is a list of strings, none of them empty")
    return tuple(strings)


def role(item: Body, known: Mapping[str, str]) -> str:
    """Return the role of a message, as templates call it. Raises `RequestRefused` for an unknown role."""
    value = item.get("role")
    if not isinstance(value, str) or value not in known:
        raise malformed(f"a message's role is one of {', '.join(known)}, not {str(value)[:100]!r}")
    return known[value]


def object_list(value: object, name: str) -> Sequence[Body]:
    """Return `value` if it is a list of objects. Raises `RequestRefused` for other values."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise malformed(f"{name} is a list of objects")
    return cast("Sequence[Body]", value)


def text(content: object, where: str) -> str:
    """Return the text of a message's content: a text, or a list of text parts. Raises `RequestRefused`."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part, where) for part in object_list(content, f"the content of {where}"))


def _part(part: Body, where: str) -> str:
    kind, content = part.get("type"), part.get("text")
    if kind in PARTS and isinstance(content, str):
        return content
    raise malformed(f"the content of {where} is only text, and this has a part of the type {kind!r}")


def call(call_id: object, name: object, arguments: object) -> JsonObject:
    """Make a tool call for chat templates, with its arguments as values. Raises `RequestRefused` without a name."""
    if not isinstance(name, str) or not name:
        raise malformed("a tool call has no name")
    try:
        values = json_values.plain(json_values.read(arguments)) if isinstance(arguments, str) else arguments
    except ValueError:
        values = arguments
    id_text = call_id if call_id is None else str(call_id)
    return {"id": id_text, "type": "function", "function": {"name": name, "arguments": values or {}}}


def tool(name: object, description: object, parameters: object) -> JsonObject:
    """Make the description of a tool for chat templates. Raises `RequestRefused` without a name."""
    if not isinstance(name, str) or not name:
        raise malformed("a tool has no name")
    optional = {"description": description} if isinstance(description, str) else {}
    return {"type": "function", "function": {"name": name, **optional, "parameters": parameters or {}}}


def tools(body: Body, read: Callable[[Body], JsonObject]) -> tuple[JsonObject, ...]:
    """Return the tools of a request, each made by `read`; none if the request forbids calls."""
    listed = object_list(body.get("tools") or [], "tools") if choice(body) != "none" else ()
    return tuple(map(read, listed))


def token_limit(body: Body, *names: str) -> int | None:
    """Return the first named token limit that is set. Raises `RequestRefused` unless it is a number above 0."""
    return next((limit for name in names if (limit := positive(body, name, "tokens")) is not None), None)


def positive(body: Body, name: str, unit: str) -> int | None:
    """Return the number of `unit` under `name` in a request, None if it is missing. Raises `RequestRefused`."""
    value = body.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise malformed(f"{name} is a number of {unit} above 0, not {value!r}")
    return value


def arguments_of(body: Body) -> Body:
    """Return a request's arguments for the chat template, under the name that vLLM and SGLang use."""
    value = body.get("chat_template_kwargs") or {}
    if not isinstance(value, dict):
        raise malformed("chat_template_kwargs are arguments by name")
    return value


def event(value: object, name: str = "") -> bytes:
    """Write one server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(value)}\n\n".encode()


def new_texts(previous: Reply, current: Reply) -> tuple[str, str]:
    """Return the reasoning and the text that `current` adds to `previous`; "" for a text that does not continue it."""
    pairs = ((previous.reasoning, current.reasoning), (previous.content, current.content))
    thought, content = (after[len(before) :] if after.startswith(before) else "" for before, after in pairs)
    return thought, content


def now() -> int:
    """Return the time in whole seconds, as answers give it."""
    return int(time.time())
