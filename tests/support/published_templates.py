# A template is read best as its authors write it.
# ruff: noqa: E501, RUF001
"""Tokenizers with chat templates as model families publish them: short ones, and those that TRL ships where it is."""

import re
from importlib import metadata
from pathlib import Path

from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer

CONTROL = re.compile(
    r"<\|[A-Za-z_0-9]+\|>|<\|[a-z_]+>|<[a-z_]+\|>|<｜[^｜'\"\s]+｜>|\[/?[A-Z_]+\]"
    r"|</?(?:start|end)_of_turn>|</?(?:think|tool_call|tool_response|eos|s|end_of_utterance)>"
)
"""Names that templates write as single tokens."""
MARKERS = re.compile("think|tool_")
"""Of these the ones that tokenizers have as added tokens that are not special."""
SHORT = {
    # Llama 3.1: a call takes the place of the content, and there is one at most.
    "llama3.1": """\
{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'tool' %}
    {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
    {%- if message.tool_calls | length != 1 %}{{- raise_exception('This model only supports single tool-calls') }}{% endif %}
    {%- set call = message.tool_calls[0].function %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
    {{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    # Mistral 7B v0.3: ids of nine signs.
    "mistral": """\
{{- bos_token }}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in message.tool_calls %}
        {%- if call.id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
        {{- call.function | tojson }}{{- ', ' if not loop.last else ']' + eos_token }}
    {%- endfor %}
{%- elif message.role == 'assistant' %}{{- ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
    {%- if message.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}{% endif %}
    {{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- endif %}{%- endfor %}""",
    # GLM 4.5: a turn ends with the role of the next one.
    "glm": """\
[gMASK]<sop>{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|user|>\\n' + message.content }}
{%- elif message.role == 'assistant' %}
    {{- '<|assistant|>\\n<think></think>' + ('\\n' + message.content if message.content else '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + call.function.name }}
        {%- for name, value in call.function.arguments.items() %}{{- '\\n' + name + '=' + value | string }}{% endfor %}
        {{- '\\n</tool_call>' }}
    {%- endfor %}
{%- elif message.role == 'tool' %}
    {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|observation|>' }}{% endif %}
    {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% endif %}""",
    # Gemma 4: answers stand in the turn of the call, and behind it alone.
    "gemma4": """\
{{- bos_token }}{%- set ns = namespace(calls=[], open=false) %}{%- for message in messages %}
{%- if message.role == 'tool' %}
    {%- for call in ns.calls if call.id == message.tool_call_id %}
        {{- '<|tool_response>response:' + call.function.name + '{' + message.content + '}<tool_response|>' }}
    {%- endfor %}
{%- else %}
    {%- if not ns.open %}{{- '<|turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}{% endif %}
    {{- message.content or '' }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|tool_call>call:' + call.function.name + call.function.arguments | tojson + '<tool_call|>' }}
    {%- endfor %}
    {%- set ns.calls = message.tool_calls or [] %}{%- set ns.open = ns.calls | length > 0 %}
    {%- if not ns.open %}{{- '<turn|>\\n' }}{% elif loop.last %}{{- '<|tool_response>' }}{% endif %}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt and not ns.open %}{{- '<|turn>model\\n' }}{% endif %}""",
    # GPT-OSS: a turn ends in one way at the end of a conversation, in another within it, in a third with a call.
    "gpt-oss": """\
{%- set ns = namespace(name=none) %}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|start|>user<|message|>' + message.content + '<|end|>' }}
{%- elif message.tool_calls %}
    {%- set ns.name = message.tool_calls[0].function.name %}
    {{- '<|start|>assistant to=functions.' + ns.name + '<|channel|>commentary json<|message|>' }}
    {{- message.tool_calls[0].function.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
    {%- if ns.name is none %}{{- raise_exception('Message has tool role, but there was no previous assistant message with a tool call!') }}{% endif %}
    {{- '<|start|>functions.' + ns.name + ' to=assistant<|channel|>commentary<|message|>' + message.content | tojson + '<|end|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}""",
    # Phi 3: the roles that it does not know are left out without a word.
    "phi": """\
{%- for message in messages if message.role in ('user', 'assistant') %}
    {{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}""",
    # Kimi K3: closing tokens repeat within a turn, and the end of a turn does not.
    "kimi-k3": """\
{%- macro close(tag) %}{{- '<|close|>' + tag + '<|sep|>' }}{% endmacro %}
{%- for message in messages %}
    {{- '<|open|>message role="' + message.role + '"<|sep|>' }}
    {%- if message.role == 'assistant' %}
        {{- '<|open|>response<|sep|>' + (message.content or '') + close('response') }}
        {%- for call in message.tool_calls or [] %}
            {{- '<|open|>call tool="' + call.function.name + '"<|sep|>' + call.function.arguments | tojson + close('call') }}
        {%- endfor %}
    {%- else %}{{- message.content }}{% endif %}
    {{- close('message') + '<|end_of_msg|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>' }}{% endif %}""",
    # Command R7B: the calls of a conversation are numbered, and so are their answers.
    "command": """\
{%- set ns = namespace(called=0, answered=0) %}{{- bos_token }}{%- for message in messages %}
{{- '<|START_OF_TURN_TOKEN|>' }}
{%- if message.role == 'tool' %}
    {{- '<|SYSTEM_TOKEN|>{"tool_call_id": ' ~ ns.answered ~ ', "result": "' ~ message.content ~ '"}' }}
    {%- set ns.answered = ns.answered + 1 %}
{%- elif message.role == 'assistant' %}
    {{- '<|CHATBOT_TOKEN|>' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}
        {{- '<|START_ACTION|>{"tool_call_id": ' ~ ns.called ~ ', "parameters": ' ~ call.function.arguments | tojson ~ '}<|END_ACTION|>' }}
        {%- set ns.called = ns.called + 1 %}
    {%- endfor %}
{%- else %}{{- '<|USER_TOKEN|>' + message.content }}{% endif %}
{{- '<|END_OF_TURN_TOKEN|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>' }}{% endif %}""",
    # Apriel 1.6: a turn is ended, and its calls have ids, only if a message follows.
    "apriel": """\
{%- for message in messages %}
{{- '<|begin|>' + message.role + '\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
    {{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
    {{- '}' if loop.last and messages[-1] is sameas message else ', "id": "' + call.id + '"}' }}
{%- endfor %}
{%- if message.role != 'assistant' or not loop.last %}{{- '\\n<|end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|begin|>assistant\\n' }}{% endif %}""",
    # DeepSeek R1: a message with calls has no content, and the answers of later calls have no heading.
    "deepseek-r1": """\
{{- bos_token }}{%- set ns = namespace(first=true) %}{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}
{%- elif message.role == 'tool' %}
    {{- '<｜tool▁outputs▁begin｜>' if ns.first else '\\n' }}{%- set ns.first = false %}
    {{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- elif message.content is none %}
    {%- for call in message.tool_calls %}{{- '<｜tool▁call▁begin｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}{% endfor %}
    {{- '<｜end▁of▁sentence｜>' }}
{%- else %}{{- message.content + '<｜end▁of▁sentence｜>' }}{% endif %}{%- endfor %}""",
}
"""Templates written to the rules of families, where they differ in what follows a call."""


def shipped() -> dict[str, Path]:
    """The templates that TRL ships, as their models' authors have written them."""
    try:
        files = metadata.files("trl") or []
    except metadata.PackageNotFoundError:
        return {}
    paths = [Path(str(one.locate())) for one in files if one.match("chat_templates/*.jinja")]
    return {path.stem: path for path in sorted(paths) if not path.stem.endswith("_training")}


def tokenizer(template: str, folder: Path) -> Tokenizer:
    """Make a tokenizer of characters with the tokens that a template writes; it ends a turn as the template does."""
    names = sorted({*CONTROL.findall(template), "<bos>"})
    made = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    made.add_special_tokens({"bos_token": "<bos>"})
    made.add_special_tokens({"additional_special_tokens": [one for one in names if not MARKERS.search(one)]})
    made.add_tokens([one for one in names if MARKERS.search(one)])
    made.chat_template = template
    made.save_pretrained(folder)
    found = Tokenizer(folder)
    if (end := found.turn_end()) is None:
        return found
    made.eos_token = found.name(end)
    made.save_pretrained(folder)
    return Tokenizer(folder)
