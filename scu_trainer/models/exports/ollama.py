"""Write a Modelfile for Ollama, whose chat templates are in Go's template language instead of transformers' Jinja.

Templates are not translated. Sample conversations are rendered by the model's own template, and the text between two
messages is read from the result. A template that depends on more than that, for instance on the text of a message, is
detected by rendering other conversations, and is not written.

Source: https://docs.ollama.com/modelfile and https://docs.ollama.com/template
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional

MODELFILE = "Modelfile"
PLAIN_ANSWERS = "{{ range .Messages }}{{ .Content }}\n\n{{ end }}"
"""The same format as plain_prompt of data/records.py."""

SYSTEM, USER, ASSISTANT, START, END = "system", "user", "assistant", "", "end"
TURNS = ((USER,), (USER, ASSISTANT, USER), (USER, ASSISTANT, USER, ASSISTANT, USER))
CONVERSATIONS = tuple(roles for turns in TURNS for roles in (turns, (SYSTEM, *turns)))

SAMPLE_TEXTS = {SYSTEM: "Be brief.", USER: "How are you?\nWell?", ASSISTANT: "Fine: 1 < 2, thanks."}

Borders = dict[tuple[str, str], str]
"""Texts between two messages, by the roles (before, after): START before the first, END after the last."""


def rendered_by(borders: Borders, messages: Sequence[dict[str, str]]) -> str:
    """Render ``messages`` as the Modelfile's template does."""
    before, result = START, ""
    for message in messages:
        result += borders.get((before, message["role"]), "\0") + message["content"]
        before = message["role"]
    return result + borders[before, END]


def in_go(borders: Borders) -> str:
    """Return the template in Go's language, in one line apart from line breaks in the texts."""
    cases: dict[str, str] = {}
    for role in (SYSTEM, USER, ASSISTANT):
        texts = {before: text for (before, after), text in borders.items() if after == role}
        if texts:
            cases[role] = next(iter(texts.values())) if len({*texts.values()}) == 1 else _switch("$before", texts)
    return (
        f'{{{{ $before := "" }}}}{{{{ range .Messages }}}}{_switch(".Role", cases)}{{{{ .Content }}}}'
        f"{{{{ $before = .Role }}}}{{{{ end }}}}{borders[USER, END]}"
    )


def _switch(name: str, texts: Mapping[str, str]) -> str:
    """Return a Go expression that selects the text for the value of ``name``."""
    cases = (f'if eq {name} "{value}" }}}}{text}' for value, text in texts.items())
    return "{{ " + "{{ else ".join(cases) + "{{ end }}"


def borders_of(tokenizer: Any) -> Optional[Borders]:
    """Return the texts between messages in the tokenizer's chat template. None if it has no template, or one that
    depends on more than the roles or cannot be written in Go."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    borders: Borders = {}
    for roles in CONVERSATIONS:
        _collect_borders(tokenizer, roles, borders)
    conversations = [_messages(roles, [SAMPLE_TEXTS[role] for role in roles]) for roles in CONVERSATIONS]
    is_same = all(_rendered(tokenizer, turns) in (None, rendered_by(borders, turns)) for turns in conversations)
    is_writable = not any(sign in text for text in borders.values() for sign in ("{{", "}}", '"""'))
    return borders if is_same and (USER, END) in borders and is_writable else None


def template_of(tokenizer: Any, answers_plain_text: bool = False) -> tuple[Optional[str], str]:
    """Return (template in Ollama's language, a line that says how it was made). The template is None if it cannot be
    written; Ollama then looks for one itself. ``answers_plain_text``: see Talker."""
    if not getattr(tokenizer, "chat_template", None):
        if answers_plain_text:
            return PLAIN_ANSWERS, "Modelfile: no chat template, a blank line follows the question"
        return "{{ .Prompt }}", "Modelfile: no chat template, the prompt is continued"
    borders = borders_of(tokenizer)
    if borders is None:
        reason = "the chat template depends on more than the roles, and cannot be written in Ollama's language"
        return None, f"Modelfile: {reason}; Ollama uses its own template if it knows this one"
    return in_go(borders), "Modelfile: the chat template's text between messages, compared on six conversations"


def _collect_borders(tokenizer: Any, roles: Sequence[str], borders: Borders) -> None:
    """Add the texts between the messages of one conversation to ``borders``, without replacing any."""
    contents = [f"\u2301{n}\u2301" for n in range(len(roles))]
    text = _rendered(tokenizer, _messages(roles, contents))
    if text is None or any(text.count(content) != 1 for content in contents):
        return
    before = START
    for role, content in zip(roles, contents, strict=True):
        border, _, text = text.partition(content)
        borders.setdefault((before, role), border)
        before = role
    borders.setdefault((before, END), text)


def _messages(roles: Sequence[str], contents: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> Optional[str]:
    """Render ``messages`` without the BOS token that llama.cpp adds to every text; None if the template raises."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template may raise any error, for instance because it accepts no system message
        return None
    first = tokenizer.bos_token
    is_added = first and tokenizer("a")["input_ids"][:1] == [tokenizer.convert_tokens_to_ids(first)]
    return text.removeprefix(first) if is_added else text


def model_name(name: str) -> str:
    """Return ``name`` as Ollama accepts it (its types/model/name.go): ASCII letters, digits, and - _ . inside."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "model"


def modelfile(file_name: str, template: Optional[str], stops: Sequence[str], positions: Optional[int]) -> str:
    """Return the text of the Modelfile. ``stops`` are texts that end an answer. ``positions`` of the model are written
    if they are fewer than Ollama's default of 4,096."""
    lines = [f"FROM ./{file_name}", *([] if template is None else [f'TEMPLATE """{template}"""'])]
    lines += [f"PARAMETER stop {_quoted(text)}" for text in stops]
    if positions is not None and positions < 4096:
        lines.append(f"PARAMETER num_ctx {positions}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
