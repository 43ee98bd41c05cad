"""The chat templates of the toy policies: they write a conversation in the policies' few characters."""

# `State the final answer to the following arithmetic problem: 3 + 4 - 5 =` becomes `3+4-5`. Only a prompt that is to
# be answered is checked: TRL probes templates with conversations of its own.
_USER = """\
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {%- set asked = message.content.split(':')[-1].split() | join -%}
        {%- set asked = asked.removesuffix('=') -%}
        {%- set unknown = asked | list | reject('in', ALPHABET) | list -%}
        {%- if unknown and add_generation_prompt and loop.last -%}
            {{- raise_exception('the toy policy reads only the characters ' ~ ALPHABET ~ ', and a prompt holds '
                ~ (unknown[0] | tojson) ~ ': ' ~ (message.content[:80] | tojson)
                ~ '. Choose a model with --model_name_or_path, or leave --instruction empty') -}}
        {%- endif -%}
        {{- asked -}}
"""

_SUMS = """\
    {%- elif message.role == 'assistant' -%}
        {{- '=' ~ message.content ~ eos_token -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '=' -}}{%- endif -%}"""

_TOOL = """\
    {%- elif message.role == 'assistant' -%}
        {{- '>' -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set arguments = call.function.arguments -%}
            {%- if call.function.name == 'TOOL' and arguments.keys() | list == ['ARGUMENT'] -%}
                {{- '[' ~ arguments.ARGUMENT ~ ']' -}}
            {%- else -%}
                {{- '[' ~ call.function.name ~ arguments | tojson ~ ']' -}}
            {%- endif -%}
        {%- endfor -%}
        {{- (message.content or '') ~ eos_token -}}
    {%- elif message.role == 'tool' -%}
        {{- '{' ~ ('?' if message.content.startswith('{') else message.content) ~ '}' -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '>' -}}{%- endif -%}"""


def sums_template(alphabet: str) -> str:
    return _USER.replace("ALPHABET", repr(alphabet)) + _SUMS


def tool_template(alphabet: str, tool: str, argument: str) -> str:
    """Calls of the one tool are written `[…]`, what it shows `{…}`, or `{?}` for an error."""
    return _USER.replace("ALPHABET", repr(alphabet)) + _TOOL.replace("TOOL", tool).replace("ARGUMENT", argument)


def tool_response(tool: str, argument: str) -> dict:
    """What the policy says, read back as a message (transformers' response templates)."""
    call = {"type": "function", "function": {"name": tool, "arguments": {argument: "{content}"}}}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": ">",
        "fields": {
            "tool_calls": {"open": "[", "close": "]", "repeats": True, "content": "text", "transform": call},
            "content": {"close": "<eos>", "content": "text"},
        },
    }
