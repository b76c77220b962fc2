"""What a row says: plain text, a prompt with its completion, a question with its answer, or a conversation.

The names of the columns decide, row by row, in this order: columns that the settings name; a conversation
(``messages``, ``conversations``); ``prompt`` with ``completion``, as TRL has them; a question with an answer under the
names that Alpaca, Dolly, GSM8K and their like use; ``text``. Every column that is not read is named in the statistics.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from scu_trainer.data.messages import KNOWN_ROLES, ROLES, messages_of, tools_of
from scu_trainer.data.records import BadRow, Chat, Completion, Content, Pair, Text
from scu_trainer.errors import nearest

DEFAULT_TEXT_COLUMN = "text"
CHAT_COLUMNS = ("messages", "conversations", "conversation")
PROMPTS = ("instruction", "question", "prompt", "query", "problem")
ANSWERS = ("output", "response", "answer", "completion", "solution", "targets")
CONTEXTS = ("input", "context")
ALONE = ("input", "inputs")
"""Names of a question where there is no other one."""

SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")
IMAGES = ("images", "image", "videos", "video", "audios", "audio")
"""What a conversation shows beside its words, which this task cannot learn from."""

PREFERENCES = ("chosen", "rejected")
LABELS = ("label", "kto_tag")
"""Whether an answer is a good one, as KTO has it: true or false, or 1 or 0."""

KNOWN_COLUMNS = (
    *(*CHAT_COLUMNS, *PROMPTS, *ANSWERS, *CONTEXTS, *SYSTEMS, *TOOLS, *IMAGES, *PREFERENCES, *LABELS),
    *("history", "text", "inputs"),
)


_SPEAKERS = "|".join({**ROLES, **dict.fromkeys(KNOWN_ROLES)})
_LIST_OF_MESSAGES = re.compile(
    rf"""\s*\[\s*\{{\s*["'](?:(?:content|value)["']\s*:.*["'])?(?:role|from)["']\s*:\s*["'](?:{_SPEAKERS})["']""",
    re.DOTALL | re.IGNORECASE,
)
"""The first key names a speaker, or what one says before that: an answer that lists other objects stays a text."""


class Columns(NamedTuple):
    """Names that the settings give; None: the usual ones."""

    text: str = DEFAULT_TEXT_COLUMN
    prompt: Optional[str] = None
    response: Optional[str] = None
    system: Optional[str] = None
    messages: Optional[str] = None

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(name for name in self if name is not None)

    @property
    def are_named(self) -> bool:
        """Whether somebody said where the content stands."""
        return self.named != (DEFAULT_TEXT_COLUMN,)


class Understood(NamedTuple):
    """``format``: its name, with the columns that it is read from. ``not_used``: the other columns with a value."""

    content: Content
    format: str
    not_used: tuple[str, ...]


def understand(row: dict, columns: Columns) -> Understood:
    """The content of one row. Raises BadRow with the reason if it has none that can be used."""
    read = _named(row, columns) if columns.are_named else None
    usual = read or _chat(row, columns.system) or _completion(row, columns.system) or _pair(row, columns.system)
    name, content, used = usual or _text(row, columns.text)
    if not columns.are_named:
        _refuse_what_would_be_lost(row, content)
    used = tuple(column for column in used if column in row)
    is_unmarked = columns.are_named or isinstance(content, Text)
    marks = () if is_unmarked else tuple(name for name in LABELS if _mark(row, name) is True)
    left = [name for name, value in row.items() if name not in (*used, *marks) and not _is_empty(value)]
    said = _said(content) if left else ()
    not_used = tuple(f"{name} (a copy)" if row[name] in said else str(name) for name in left)
    return Understood(content, f"{name} ({', '.join(used)})", not_used)


def _said(content: Content) -> list[Any]:
    """Texts, and the conversation, of which a column may be a copy."""
    if isinstance(content, Chat):
        return [*(message["content"] for message in content.messages), content.messages]
    return list(content)


Read = tuple[str, Content, Sequence[str]]
"""(name of the format, content, columns that it may stand in)"""


def _named(row: dict, columns: Columns) -> Optional[Read]:
    """From the columns of the settings; None where they name none with the content, and the usual names decide."""
    if columns.messages is not None:
        return _conversation(row, _present(row, columns.messages, "messages_column"), columns.system)
    if columns.prompt is not None or columns.response is not None:
        prompt = columns.prompt or _only(row, PROMPTS, "prompt_column")
        response = columns.response or _only(row, ANSWERS, "response_column")
        for name, setting in ((prompt, "prompt_column"), (response, "response_column")):
            _present(row, name, setting)
        if are_messages(row[prompt]) or are_messages(row[response]):
            return _messages_pair(row, prompt, response, columns.system)
        return _question(row, prompt, response, columns.system, is_named=True)
    if columns.text != DEFAULT_TEXT_COLUMN:
        return _text(row, _present(row, columns.text, "text_column"))
    return None


def _chat(row: dict, system_column: Optional[str]) -> Optional[Read]:
    column = next((name for name in CHAT_COLUMNS if row.get(name) is not None), None)
    return None if column is None else _conversation(row, column, system_column)


def _conversation(row: dict, column: str, system_column: Optional[str]) -> Read:
    messages, system = under_system(row, messages_of(row[column], column), system_column)
    tools_column = next((name for name in TOOLS if not _is_empty(row.get(name))), TOOLS[0])
    is_sharegpt = isinstance(row[column], list) and isinstance(row[column][0], dict) and "from" in row[column][0]
    name = "ShareGPT conversations" if is_sharegpt else "messages"
    return name, Chat(messages, tools_of(row.get(tools_column))), (column, tools_column, *system)


def under_system(row: dict, messages: list[dict], system_column: Optional[str]) -> tuple[list[dict], tuple[str, ...]]:
    """``messages`` under the system prompt that stands beside them, unless they have one; the column that was read."""
    column = system_column or next((name for name in SYSTEMS if not _is_empty(row.get(name))), SYSTEMS[0])
    system = row.get(column)
    if not isinstance(system, str) or messages[0]["role"] == "system":
        return messages, ()
    return [{"role": "system", "content": system}, *messages] if system.strip() else messages, (column,)


def _completion(row: dict, system_column: Optional[str]) -> Optional[Read]:
    if "prompt" not in row or "completion" not in row:
        return None
    if are_messages(row["prompt"]) or are_messages(row["completion"]):
        return _messages_pair(row, "prompt", "completion", system_column)
    content = Completion(_string(row, "prompt"), _string(row, "completion"))
    return "prompt and completion", content, ("prompt", "completion")


def _messages_pair(row: dict, prompt: str, response: str, system_column: Optional[str]) -> Read:
    """A prompt and a completion made of messages; the prompt may be part of the answer's list already."""
    before = _as_messages(row[prompt], prompt, "user")
    after = _as_messages(row[response], response, "assistant")
    if after[: len(before)] == before:
        after = after[len(before) :]
    before, system = under_system(row, before, system_column)
    tools = next((name for name in TOOLS if not _is_empty(row.get(name))), TOOLS[0])
    content = Chat(before + after, tools_of(row.get(tools)), prompt_turns=len(before))
    return "prompt and completion as messages", content, (prompt, response, tools, *system)


def are_messages(value: Any) -> bool:
    """A list, or one that a table holds as text."""
    return isinstance(value, list) or (isinstance(value, str) and _LIST_OF_MESSAGES.match(value) is not None)


def _as_messages(value: Any, column: str, role: str) -> list[dict]:
    is_text = isinstance(value, str) and not are_messages(value)
    return [{"role": role, "content": value}] if is_text else messages_of(value, column)


def _pair(row: dict, system_column: Optional[str]) -> Optional[Read]:
    """A question and its answer under usual names, of each exactly one with text."""
    prompts, answers = ([name for name in names if isinstance(row.get(name), str)] for names in (PROMPTS, ANSWERS))
    prompts = prompts or [name for name in ALONE if isinstance(row.get(name), str)]
    if not prompts or not answers:
        return _no_pair(row)
    if len(prompts) > 1 or len(answers) > 1:
        raise BadRow(
            f"has several columns that could be the question or the answer: {', '.join((*prompts, *answers))}. Name "
            f"them, for instance --prompt_column {prompts[0]} --response_column {answers[0]}"
        )
    return _question(row, prompts[0], answers[0], system_column)


def _no_pair(row: dict) -> None:
    """Raises BadRow where a question and an answer have their columns, and one of them holds no text in this row."""
    both = [next((name for name in names if name in row), None) for names in ((*PROMPTS, *ALONE), ANSWERS)]
    if None not in both and DEFAULT_TEXT_COLUMN not in row:
        for name in both:
            _string(row, name)


def _question(row: dict, prompt: str, answer: str, system_column: Optional[str], *, is_named: bool = False) -> Read:
    """``is_named``: the settings say where question and answer stand; what is no text beside them is not read then."""
    context = _filled(row, [name for name in CONTEXTS if name not in (prompt, answer)])
    context, given = _beside(row, context, (prompt, answer), is_named)
    if system_column is None:
        system, said = _beside(row, _filled(row, SYSTEMS), (prompt, answer), is_named)
    else:
        system, said = system_column, "" if _is_empty(row.get(system_column)) else _string(row, system_column)
    pair = Pair(
        _string(row, prompt) + (f"\n{given}" if given.strip() else ""),
        _string(row, answer),
        said,
        _history(row.get("history")),
    )
    is_alpaca = prompt == "instruction" and answer == "output"
    used = [name for name in (prompt, context, answer, system, "history") if name is not None]
    return "Alpaca" if is_alpaca else "question and answer", pair, used


def asked(row: dict, prompt: str) -> list[dict]:
    """The question in the column ``prompt`` as messages, with all that a training reads beside it. Raises BadRow."""
    around = [_filled(row, names) for names in (CONTEXTS, SYSTEMS)]
    odd = next((name for name in around if not (_is_empty(row.get(name)) or isinstance(row[name], str))), None)
    if odd is not None:
        found = f"column {odd!r} holds {type(row[odd]).__name__}, not text, and belongs to {prompt!r}"
        raise BadRow(f"{found}; write it as text, or remove it")
    _, pair, _ = _question({**row, ANSWERS[0]: ""}, prompt, ANSWERS[0], None)
    return pair.as_chat().messages[:-1]


def _beside(row: dict, name: Optional[str], pair: tuple[str, str], is_named: bool) -> tuple[Optional[str], str]:
    """A column that belongs to the question of ``pair``, and its text; (None, "") where it is not read."""
    value = None if name is None else row.get(name)
    if _is_empty(value) or isinstance(value, str):
        return name, value if isinstance(value, str) else ""
    if is_named:
        return None, ""
    raise BadRow(  # a table that guessed, or several texts in one
        f"column {name!r} holds {type(value).__name__}, not text, and the answer would be learned without it; write it "
        f"as text, or leave it out: --prompt_column {pair[0]} --response_column {pair[1]}"
    )


def _filled(row: dict, names: Sequence[str]) -> Optional[str]:
    """The first of ``names`` that has a value, or else that is there."""
    there = [name for name in names if name in row]
    return next((name for name in there if not _is_empty(row[name])), there[0] if there else None)


def _history(value: Any) -> tuple[tuple[str, str], ...]:
    """Of Alpaca: a list of [question, answer]."""
    turns = () if _is_empty(value) else value
    if not isinstance(turns, (list, tuple)) or not all(map(_is_turn, turns)):
        raise BadRow("column 'history' is not a list of [question, answer]")
    return tuple(map(tuple, turns))


def _is_turn(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _text(row: dict, column: str) -> Read:
    if column not in row:
        raise BadRow(_no_column(row, column))
    return "text", Text(_string(row, column)), (column,)


def _refuse_what_would_be_lost(row: dict, content: Content) -> None:
    """Rows whose meaning stands in a column that this task does not learn from."""
    if all(not _is_empty(row.get(name)) for name in PREFERENCES) and not isinstance(content, Text):
        raise BadRow(_PREFERENCE)
    if isinstance(content, Text):
        return
    shown = next((name for name in IMAGES if not _is_empty(row.get(name))), None)
    if shown is not None:
        raise BadRow(
            f"belongs to what its column {shown!r} shows, but this task only learns text; remove such rows, or name "
            "the columns with the text (prompt_column and response_column, or messages_column) to learn only that"
        )
    mark = next((name for name in LABELS if _mark(row, name) is False), None)
    if mark is not None:
        raise BadRow(
            f"is marked as a bad answer ({mark}: {str(row[mark]).lower()}), and would be learned as a good one; remove "
            "such rows, or train with TRL's KTOTrainer and our loops (see docs/any_trainer.md). If it means something "
            "else, rename the column, or name those of question and answer (prompt_column and response_column, or "
            "messages_column)"
        )


def _mark(row: dict, name: str) -> Optional[bool]:
    """A mark of KTO, which a table may hold as a word; None for anything else. 0 and 1 are marks where KTO has them,
    under its own name or beside prompt and completion; elsewhere they may be classes."""
    marks = {"true": True, "false": False}
    if name == "kto_tag" or {"prompt", "completion"} <= {*row}:
        marks |= {"1": True, "1.0": True, "0": False, "0.0": False}
    return marks.get(str(row.get(name)).strip().lower())


_PREFERENCE = (
    "is a pair of a chosen and a rejected answer, and this task does not learn from rejected ones; train with "
    "TRL's DPOTrainer and our loops (see docs/any_trainer.md), or learn the chosen answers alone: "
    "--prompt_column prompt --response_column chosen, or where it holds question and answer --messages_column chosen "
    "(--text_column chosen, if it is text)"
)


def _present(row: dict, column: str, setting: str) -> str:
    if column not in row:
        raise BadRow(
            f"has no column {column!r}, which {setting} names{nearest(column, map(str, row))}; {_columns(row)}"
        )
    return column


def _only(row: dict, names: Sequence[str], setting: str) -> str:
    found = [name for name in names if name in row]
    if len(found) != 1:
        raise BadRow(
            f"has {len(found)} columns that could be meant; name the right one with --{setting}; {_columns(row)}"
        )
    return found[0]


def _columns(row: dict) -> str:
    return f"its columns: {', '.join(map(str, row)) or 'none'}"


def _no_column(row: dict, text_column: str) -> str:
    """Why a row without ``text_column`` says nothing that can be learned."""
    if any(not _is_empty(row.get(name)) for name in PREFERENCES):
        return _PREFERENCE
    known = _part_of_something(row)
    if known is not None:
        return known
    example = shlex.quote(next((str(column) for column, value in row.items() if isinstance(value, str)), "X"))
    return (
        f"has no column {text_column!r}; {_columns(row)}{nearest(text_column, map(str, row))}. Name the one with the "
        f"text, for instance --text_column {example}; those of a question and its answer with --prompt_column and "
        "--response_column; that of a conversation with --messages_column"
    )


def _part_of_something(row: dict) -> Optional[str]:
    """What is missing, in a row whose columns say what it was meant to be."""
    if "input_ids" in row:
        return (
            f"holds tokens (input_ids), and the commands turn text into tokens themselves; {_columns(row)}. Give the "
            "text that they were made of, or train on the tokens in Python: a dataset of such rows is what a Trainer "
            "takes (docs/any_trainer.md)"
        )
    chat = next((name for name in CHAT_COLUMNS if name in row), None)
    if chat is not None:
        return f"column {chat!r} is empty instead of holding a conversation"
    in_capitals = _in_capitals(row)
    if in_capitals is not None:
        return in_capitals
    question = next((name for name in (*PROMPTS, *ALONE) if not _is_empty(row.get(name))), None)
    if question is not None and not any(name in row for name in ANSWERS):
        return (
            f"has a question ({question}) and no answer ({', '.join(ANSWERS[:3])}, ...); {_columns(row)}. If the "
            "answer has another name, give it with --response_column"
        )
    if len(row) > 1 and all(_is_list_of_rows(value) for value in row.values()):
        return (
            f"is an object that holds several lists ({', '.join(map(str, row))}), not a row; write each list to a file "
            f"of its own, one object per line, for instance {next(iter(row))}.jsonl"
        )
    return None


def _in_capitals(row: dict) -> Optional[str]:
    """Of a row whose columns would be known in small letters: Question, Answer."""
    usual, typed = ((*PROMPTS, *ALONE), ANSWERS), {str(name).lower(): str(name) for name in row}
    prompt, answer = (next((typed[name] for name in names if name in typed), None) for names in usual)
    if prompt is None or answer is None:
        return None
    said = f"has its question and answer in {prompt} and {answer}, and such names are known in small letters only; "
    beside = [typed[name] for name in (*CONTEXTS, *SYSTEMS) if typed.get(name) not in (None, name, prompt)]
    if not beside:
        return f"{said}name them: --prompt_column {prompt} --response_column {answer}"
    renamed = ", ".join(f"{name} to {name.lower()}" for name in (*beside, prompt, answer) if name != name.lower())
    return f"{said}{beside[0]} belongs to them and would not be read by another name: rename {renamed}"


def _is_list_of_rows(value: Any) -> bool:
    """Of objects that are no messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not {"role", "from"} & {*value[0]}


def _string(row: dict, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        by_columns = _BY_COLUMNS if _holds_columns(row) else ""
        raise BadRow(f"column {column!r} holds {type(value).__name__}, not text{by_columns}")
    return value


_BY_COLUMNS = (
    "; if each column holds the values of all rows, write one object per row, as pandas does with to_json(FILE, "
    "orient='records', lines=True)"
)


def _holds_columns(row: dict) -> bool:
    """Whether an object is a whole table, of columns by name, as pandas writes it unasked."""
    values = row.values()
    return all(isinstance(value, list) for value in values) or all(
        isinstance(value, dict) and "0" in value for value in values
    )


def _is_empty(value: Any) -> bool:
    """None, "", [], {} and NaN, which tables write for None; 0 and False say something."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or (isinstance(value, (str, list, dict, tuple)) and not value)
