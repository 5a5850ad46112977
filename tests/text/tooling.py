"""The embedded model's tokenizer with a chat template that writes tools and calls, and says how to read calls."""

import json
import shutil
from pathlib import Path
from typing import Any

TEMPLATE = """\
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or system %}<|im_start|>system
{{ system }}
{%- if tools %}

You may call:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}
{%- endif %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if not (loop.first and system) %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls %}<tool_call>
{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Tools come behind the system message's text, in a system message that is there even if none was sent."""

RESPONSES: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "content": {},
        "thinking": {"open": "<think>", "close": "</think>"},
        "tool_calls": {
            "open": "<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {
                "type": "function",
                "function": {"name": "{content.name}", "arguments": "{content.arguments}"},
            },
        },
    },
}
"""How a model that was trained on this template answers: words, thoughts, calls."""

ANYTHING: dict[str, Any] = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open_pattern": r"(?P<name>\w+)",
            "close_pattern": r"\Z",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": {"rest": "{content}"}}},
        },
    },
}
"""Reads any answer as one call: of its first word, with the rest as its argument. So even a small model makes calls."""


def tool(name: str, description: str = "", **properties: Any) -> dict[str, Any]:
    """A function tool in OpenAI's form."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def called(name: str, arguments: str, number: int = 1) -> dict[str, Any]:
    """An assistant's turn that calls, as it comes back from a client."""
    call = {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def write_templates(folder: Path, *, template: str | None = TEMPLATE, responses: dict[str, Any] | None = None) -> None:
    """Put other templates beside a tokenizer; the folder's files may be links and are replaced."""
    file, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    settings = {**json.loads(config.read_text()), "response_template": responses}
    settings.pop("chat_template", None)
    for old in (file, config):
        old.unlink(missing_ok=True)
    config.write_text(json.dumps(settings))
    if template is not None:
        file.write_text(template)


def tokenizer_folder(source: Path, target: Path, **templates: Any) -> Path:
    """A folder with the source's tokenizer and these templates."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(source / name, target / name)
    write_templates(target, **templates)
    return target
