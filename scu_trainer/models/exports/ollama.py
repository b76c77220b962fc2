"""A Modelfile for Ollama, whose templates are of another language (Go's) than those of transformers (Jinja).

Nothing is translated. The conversation is rendered by the model's own template, and what stands between two messages is
read off; a template that cannot be written so (one that looks at a message's text, for instance) is found by rendering
other conversations, and is not written.

Source: https://docs.ollama.com/modelfile and https://docs.ollama.com/template
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

MODELFILE = "Modelfile"
NO_TEMPLATE = "{{ .Prompt }}"
PLAIN_ANSWERS = "{{ range .Messages }}{{ .Content }}\n\n{{ end }}"
"""As plain_prompt of data/records.py."""

SYSTEM, USER, ASSISTANT, START, END = "system", "user", "assistant", "", "end"
TURNS = ((USER,), (USER, ASSISTANT, USER), (USER, ASSISTANT, USER, ASSISTANT, USER))
CONVERSATIONS = tuple(roles for turns in TURNS for roles in (turns, (SYSTEM, *turns)))

SAID = {SYSTEM: "Be brief.", USER: "How are you?\nWell?", ASSISTANT: "Fine: 1 < 2, thanks."}

Border = tuple[str, str]


@dataclass(frozen=True)
class Borders:
    """``texts``: what stands between two messages, by the roles before (START: none) and after (END: the beginning of
    an answer) it."""

    texts: dict[Border, str]

    def rendered(self, messages: Sequence[dict[str, str]]) -> str:
        """As the Modelfile's template renders it."""
        before, found = START, ""
        for message in messages:
            found += self.texts.get((before, message["role"]), "\0") + message["content"]
            before = message["role"]
        return found + self.texts[before, END]

    def in_go(self) -> str:
        """One line, but for line breaks in the texts themselves."""
        before = {role: self._before(role) for role in (SYSTEM, USER, ASSISTANT)}
        cases = {
            role: next(iter(texts.values())) if len({*texts.values()}) == 1 else _switch("$before", texts)
            for role, texts in before.items()
            if texts
        }
        return (
            f'{{{{ $before := "" }}}}{{{{ range .Messages }}}}{_switch(".Role", cases)}{{{{ .Content }}}}'
            f"{{{{ $before = .Role }}}}{{{{ end }}}}{self.texts[USER, END]}"
        )

    def _before(self, role: str) -> dict[str, str]:
        return {before: text for (before, after), text in self.texts.items() if after == role}


def _switch(name: str, texts: Mapping[str, str]) -> str:
    """The text for the value of ``name``, in Go."""
    cases = (f'if eq {name} "{value}" }}}}{text}' for value, text in texts.items())
    return "{{ " + "{{ else ".join(cases) + "{{ end }}"


def borders_of(tokenizer: Any) -> Optional[Borders]:
    """Of the tokenizer's chat template; None where it has none, or one that depends on more than the roles."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    texts: dict[Border, str] = {}
    for roles in CONVERSATIONS:
        _read(tokenizer, roles, texts)
    borders = Borders(texts)
    said = [_messages(roles, [SAID[role] for role in roles]) for roles in CONVERSATIONS]
    is_same = all(_rendered(tokenizer, messages) in (None, borders.rendered(messages)) for messages in said)
    is_writable = not any(sign in text for text in texts.values() for sign in ("{{", "}}", '"""'))
    return borders if is_same and (USER, END) in texts and is_writable else None


def template_of(tokenizer: Any, answers_plain_text: bool = False) -> tuple[Optional[str], str]:
    """(template in Ollama's language, a line that says how it was made); no template: Ollama looks for one itself.
    ``answers_plain_text``: see Talker."""
    if not getattr(tokenizer, "chat_template", None):
        if answers_plain_text:
            return PLAIN_ANSWERS, "Modelfile: no chat template, a blank line follows the question"
        return NO_TEMPLATE, "Modelfile: no chat template, the prompt is continued"
    borders = borders_of(tokenizer)
    if borders is None:
        reason = "the chat template depends on more than the roles, and cannot be written in Ollama's language"
        return None, f"Modelfile: {reason}; Ollama uses its own template if it knows this one"
    return borders.in_go(), "Modelfile: the chat template's text between messages, compared on six conversations"


def _read(tokenizer: Any, roles: Sequence[str], texts: dict[Border, str]) -> None:
    """Fills ``texts`` from one conversation; what an earlier one gave stays."""
    contents = [f"\u2301{n}\u2301" for n in range(len(roles))]
    text = _rendered(tokenizer, _messages(roles, contents))
    if text is None or any(text.count(content) != 1 for content in contents):
        return
    before = START
    for role, content in zip(roles, contents, strict=True):
        border, _, text = text.partition(content)
        texts.setdefault((before, role), border)
        before = role
    texts.setdefault((before, END), text)


def _messages(roles: Sequence[str], contents: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)]


def _rendered(tokenizer: Any, messages: list[dict[str, str]]) -> Optional[str]:
    """Without the token that llama.cpp puts before every text by itself; None where the template refuses."""
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except Exception:  # a template is a program, and raises what it likes: no system message, for instance
        return None
    first = tokenizer.bos_token
    is_put_there = first and tokenizer("a")["input_ids"][:1] == [tokenizer.convert_tokens_to_ids(first)]
    return text.removeprefix(first) if is_put_there else text


def model_name(name: str) -> str:
    """``name`` as Ollama takes it (types/model/name.go there): letters of ASCII, digits, and - _ . behind the first."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:80] or "model"


def modelfile(file_name: str, template: Optional[str], stops: Sequence[str], positions: Optional[int]) -> str:
    """``stops``: texts that end an answer. ``positions``: of the model, stated where they are fewer than the 4,096 that
    Ollama takes otherwise."""
    lines = [f"FROM ./{file_name}", *([] if template is None else [f'TEMPLATE """{template}"""'])]
    lines += [f"PARAMETER stop {_quoted(text)}" for text in stops]
    if positions is not None and positions < 4096:
        lines.append(f"PARAMETER num_ctx {positions}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
