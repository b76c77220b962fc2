"""Find the content of a row: plain text, a prompt and its completion, a question and its answer, or a conversation.

The column names decide, for each row, in this order: the columns named in the settings; a conversation (``messages``,
``conversations``); ``prompt`` and ``completion``, as in TRL; a question and its answer under the names that Alpaca,
Dolly, GSM8K and similar datasets use; ``text``. The statistics list every column that is not read.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

from scu_trainer.data.messages import KNOWN_ROLES, ROLES, messages_of, tools_of
from scu_trainer.data.records import BadRow, Chat, Completion, Content, Pair, Text
from scu_trainer.errors import did_you_mean
from scu_trainer.settings import DataSettings

DEFAULT_TEXT_COLUMN = "text"
CHAT_COLUMNS = ("messages", "conversations", "conversation")
PROMPTS = ("instruction", "question", "prompt", "query", "problem")
ANSWERS = ("output", "response", "answer", "completion", "solution", "targets")
CONTEXTS = ("input", "context")
SOLE_PROMPTS = ("input", "inputs")
"""Columns that hold the question if the row has none of ``PROMPTS``."""

SYSTEMS = ("system", "system_prompt")
TOOLS = ("tools", "functions")
IMAGES = ("images", "image", "videos", "video", "audios", "audio")
"""Columns with media that a conversation refers to. This task cannot learn from them."""

PREFERENCES = ("chosen", "rejected")
LABELS = ("label", "kto_tag")
"""Columns that mark an answer as good or bad, as in KTO: true or false, or 1 or 0."""

KNOWN_COLUMNS = (
    *(*CHAT_COLUMNS, *PROMPTS, *ANSWERS, *CONTEXTS, *SYSTEMS, *TOOLS, *IMAGES, *PREFERENCES, *LABELS),
    *("history", "text", "inputs"),
)


_SPEAKERS = "|".join({**ROLES, **dict.fromkeys(KNOWN_ROLES)})
_LIST_OF_MESSAGES = re.compile(
    rf"""\s*\[\s*\{{\s*["'](?:(?:content|value)["']\s*:.*["'])?(?:role|from)["']\s*:\s*["'](?:{_SPEAKERS})["']""",
    re.DOTALL | re.IGNORECASE,
)
"""A list of messages written as text. Its first object must begin with a speaker, or with content and then a speaker,
so that an answer that lists other objects stays text."""


class Columns(NamedTuple):
    """Column names from the settings. None means that the usual names are tried."""

    text: str = DEFAULT_TEXT_COLUMN
    prompt: Optional[str] = None
    response: Optional[str] = None
    system: Optional[str] = None
    messages: Optional[str] = None

    @classmethod
    def of(cls, settings: DataSettings) -> Columns:
        return cls(*(getattr(settings, f"{name}_column") for name in cls._fields))

    @property
    def named(self) -> tuple[str, ...]:
        return tuple(name for name in self if name is not None)

    @property
    def are_named(self) -> bool:
        """Whether the settings say which columns hold the content."""
        return self.named != (DEFAULT_TEXT_COLUMN,)


class RowContent(NamedTuple):
    """``format``: its name and the columns that were read. ``not_used``: the other columns that have a value."""

    content: Content
    format: str
    not_used: tuple[str, ...]


def read_content(row: dict, columns: Columns) -> RowContent:
    """Return the content of one row. Raises BadRow, with the reason, if the row has no usable content."""
    read = _from_named(row, columns) if columns.are_named else None
    usual = (
        read
        or _from_chat(row, columns.system)
        or _from_completion(row, columns.system)
        or _from_pair(row, columns.system)
    )
    name, content, used = usual or _from_text(row, columns.text)
    if not columns.are_named:
        _refuse_unusable_columns(row, content)
    used = tuple(column for column in used if column in row)
    is_unmarked = columns.are_named or isinstance(content, Text)
    marks = () if is_unmarked else tuple(name for name in LABELS if _mark(row, name) is True)
    left = [name for name, value in row.items() if name not in (*used, *marks) and not _is_empty(value)]
    texts = _texts_in(content) if left else ()
    not_used = tuple(f"{name} (a copy)" if row[name] in texts else str(name) for name in left)
    return RowContent(content, f"{name} ({', '.join(used)})", not_used)


def _texts_in(content: Content) -> list[Any]:
    """Return every text of the content, and the conversation itself, to find columns that only repeat them."""
    if isinstance(content, Chat):
        return [*(message["content"] for message in content.messages), content.messages]
    return list(content)


ReadRow = tuple[str, Content, Sequence[str]]
"""(name of the format, content, columns it may have been read from)"""


def _from_named(row: dict, columns: Columns) -> Optional[ReadRow]:
    """Read the columns that the settings name; None if these do not include the content, so that usual names decide."""
    if columns.messages is not None:
        return _conversation(row, _require_column(row, columns.messages, "messages_column"), columns.system)
    if columns.prompt is not None or columns.response is not None:
        prompt = columns.prompt or _only_column(row, PROMPTS, "prompt_column")
        response = columns.response or _only_column(row, ANSWERS, "response_column")
        for name, setting in ((prompt, "prompt_column"), (response, "response_column")):
            _require_column(row, name, setting)
        if are_messages(row[prompt]) or are_messages(row[response]):
            return _messages_pair(row, prompt, response, columns.system)
        return _build_pair(row, prompt, response, columns.system, is_named=True)
    if columns.text != DEFAULT_TEXT_COLUMN:
        return _from_text(row, _require_column(row, columns.text, "text_column"))
    return None


def _from_chat(row: dict, system_column: Optional[str]) -> Optional[ReadRow]:
    column = next((name for name in CHAT_COLUMNS if row.get(name) is not None), None)
    return None if column is None else _conversation(row, column, system_column)


def _conversation(row: dict, column: str, system_column: Optional[str]) -> ReadRow:
    messages, system = with_system_prompt(row, messages_of(row[column], column), system_column)
    tools_column = next((name for name in TOOLS if not _is_empty(row.get(name))), TOOLS[0])
    is_sharegpt = isinstance(row[column], list) and isinstance(row[column][0], dict) and "from" in row[column][0]
    name = "ShareGPT conversations" if is_sharegpt else "messages"
    return name, Chat(messages, tools_of(row.get(tools_column))), (column, tools_column, *system)


def with_system_prompt(
    row: dict, messages: list[dict], system_column: Optional[str]
) -> tuple[list[dict], tuple[str, ...]]:
    """Put the row's system prompt before ``messages``, unless they have one. Also returns the column read, or ()."""
    column = system_column or next((name for name in SYSTEMS if not _is_empty(row.get(name))), SYSTEMS[0])
    system = row.get(column)
    if not isinstance(system, str) or messages[0]["role"] == "system":
        return messages, ()
    return [{"role": "system", "content": system}, *messages] if system.strip() else messages, (column,)


def _from_completion(row: dict, system_column: Optional[str]) -> Optional[ReadRow]:
    if "prompt" not in row or "completion" not in row:
        return None
    if are_messages(row["prompt"]) or are_messages(row["completion"]):
        return _messages_pair(row, "prompt", "completion", system_column)
    content = Completion(_string(row, "prompt"), _string(row, "completion"))
    return "prompt and completion", content, ("prompt", "completion")


def _messages_pair(row: dict, prompt: str, response: str, system_column: Optional[str]) -> ReadRow:
    """Join a prompt and a completion that are lists of messages. The completion may repeat the prompt at its start."""
    before = _as_messages(row[prompt], prompt, "user")
    after = _as_messages(row[response], response, "assistant")
    if after[: len(before)] == before:
        after = after[len(before) :]
    before, system = with_system_prompt(row, before, system_column)
    tools = next((name for name in TOOLS if not _is_empty(row.get(name))), TOOLS[0])
    content = Chat(before + after, tools_of(row.get(tools)), prompt_turns=len(before))
    return "prompt and completion as messages", content, (prompt, response, tools, *system)


def are_messages(value: Any) -> bool:
    """Whether ``value`` is a list, or text that looks like a list of messages, as tables hold them."""
    return isinstance(value, list) or (isinstance(value, str) and _LIST_OF_MESSAGES.match(value) is not None)


def _as_messages(value: Any, column: str, role: str) -> list[dict]:
    is_text = isinstance(value, str) and not are_messages(value)
    return [{"role": role, "content": value}] if is_text else messages_of(value, column)


def _from_pair(row: dict, system_column: Optional[str]) -> Optional[ReadRow]:
    """Find a question and its answer by their usual names. Raises BadRow if several columns could be one of them."""
    prompts, answers = ([name for name in names if isinstance(row.get(name), str)] for names in (PROMPTS, ANSWERS))
    prompts = prompts or [name for name in SOLE_PROMPTS if isinstance(row.get(name), str)]
    if not prompts or not answers:
        return _require_text_in_pair(row)
    if len(prompts) > 1 or len(answers) > 1:
        raise BadRow(
            f"has several columns that could be the question or the answer: {', '.join((*prompts, *answers))}. Name "
            f"them, for instance --prompt_column {prompts[0]} --response_column {answers[0]}"
        )
    return _build_pair(row, prompts[0], answers[0], system_column)


def _require_text_in_pair(row: dict) -> None:
    """Raise BadRow if a row without a text column has a question and an answer, and one of them is not text."""
    both = [next((name for name in names if name in row), None) for names in ((*PROMPTS, *SOLE_PROMPTS), ANSWERS)]
    if None not in both and DEFAULT_TEXT_COLUMN not in row:
        for name in both:
            _string(row, name)


def _build_pair(
    row: dict, prompt: str, answer: str, system_column: Optional[str], *, is_named: bool = False
) -> ReadRow:
    """``is_named``: the settings name the two columns. Then a context or system prompt that is not text is ignored,
    unless ``system_column`` names it."""
    context = _first_filled(row, [name for name in CONTEXTS if name not in (prompt, answer)])
    context, context_text = _optional_text(row, context, (prompt, answer), is_named)
    if system_column is None:
        system, system_text = _optional_text(row, _first_filled(row, SYSTEMS), (prompt, answer), is_named)
    else:
        system, system_text = system_column, "" if _is_empty(row.get(system_column)) else _string(row, system_column)
    pair = Pair(
        _string(row, prompt) + (f"\n{context_text}" if context_text.strip() else ""),
        _string(row, answer),
        system_text,
        _history(row.get("history")),
    )
    is_alpaca = prompt == "instruction" and answer == "output"
    used = [name for name in (prompt, context, answer, system, "history") if name is not None]
    return "Alpaca" if is_alpaca else "question and answer", pair, used


def question_messages(row: dict, prompt: str) -> list[dict]:
    """Return the question in the column ``prompt`` as messages, with the context, system prompt and history that
    training would read. Raises BadRow if one of these is unusable."""
    around = [_first_filled(row, names) for names in (CONTEXTS, SYSTEMS)]
    odd = next((name for name in around if not (_is_empty(row.get(name)) or isinstance(row[name], str))), None)
    if odd is not None:
        problem = f"column {odd!r} holds {type(row[odd]).__name__}, not text, and belongs to {prompt!r}"
        raise BadRow(f"{problem}; write it as text, or remove it")
    _, pair, _ = _build_pair({**row, ANSWERS[0]: ""}, prompt, ANSWERS[0], None)
    return pair.as_chat().messages[:-1]


def _optional_text(row: dict, name: Optional[str], pair: tuple[str, str], is_named: bool) -> tuple[Optional[str], str]:
    """Return a context or system column of the question in ``pair``, and its text; (None, "") if it is not read."""
    value = None if name is None else row.get(name)
    if _is_empty(value) or isinstance(value, str):
        return name, value if isinstance(value, str) else ""
    if is_named:
        return None, ""
    raise BadRow(  # a number that a table parsed from text, or a list of several texts
        f"column {name!r} holds {type(value).__name__}, not text, and the answer would be learned without it; write it "
        f"as text, or ignore it with --prompt_column {pair[0]} --response_column {pair[1]}"
    )


def _first_filled(row: dict, names: Sequence[str]) -> Optional[str]:
    """Return the first of ``names`` that has a value in the row, or else the first that is a column of it."""
    present = [name for name in names if name in row]
    return next((name for name in present if not _is_empty(row[name])), present[0] if present else None)


def _history(value: Any) -> tuple[tuple[str, str], ...]:
    """Return the earlier turns of Alpaca's column ``history``, a list of [question, answer]."""
    turns = () if _is_empty(value) else value
    if not isinstance(turns, (list, tuple)) or not all(map(_is_turn, turns)):
        raise BadRow("column 'history' is not a list of [question, answer]")
    return tuple(map(tuple, turns))


def _is_turn(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(text, str) for text in value)


def _from_text(row: dict, column: str) -> ReadRow:
    if column not in row:
        raise BadRow(_why_no_text(row, column))
    return "text", Text(_string(row, column)), (column,)


def _refuse_unusable_columns(row: dict, content: Content) -> None:
    """Raise BadRow for what is not learned but changes the meaning: a rejected answer, media, or a mark as bad."""
    if all(not _is_empty(row.get(name)) for name in PREFERENCES) and not isinstance(content, Text):
        raise BadRow(_PREFERENCE)
    if isinstance(content, Text):
        return
    shown = media_column(row)
    if shown is not None:
        raise BadRow(
            f"refers to media in its column {shown!r}, but this task only learns text; remove such rows, or name "
            "the columns with the text (prompt_column and response_column, or messages_column) to learn only that"
        )
    mark = next((name for name in LABELS if _mark(row, name) is False), None)
    if mark is not None:
        raise BadRow(
            f"is marked as a bad answer ({mark}: {str(row[mark]).lower()}), but would be learned as a good one; remove "
            "such rows, or train with TRL's KTOTrainer and our loops (see docs/any_trainer.md). If the column means "
            "something else, rename it, or name the columns of question and answer (prompt_column and response_column, "
            "or messages_column)"
        )


def media_column(row: dict) -> Optional[str]:
    """Return the first column with media that the row refers to, or None."""
    return next((name for name in IMAGES if not _is_empty(row.get(name))), None)


def _mark(row: dict, name: str) -> Optional[bool]:
    """Return the KTO mark in column ``name``, which a table may hold as a word; None for any other value. 0 and 1 are
    marks only in ``kto_tag``, or next to ``prompt`` and ``completion``; elsewhere they may be class labels."""
    marks = {"true": True, "false": False}
    if name == "kto_tag" or {"prompt", "completion"} <= {*row}:
        marks |= {"1": True, "1.0": True, "0": False, "0.0": False}
    return marks.get(str(row.get(name)).strip().lower())


_PREFERENCE = (
    "is a pair of a chosen and a rejected answer, and this task does not learn from rejected ones; train with "
    "TRL's DPOTrainer and our loops (see docs/any_trainer.md), or learn only the chosen answers: "
    "--prompt_column prompt --response_column chosen; if chosen holds both question and answer, --messages_column "
    "chosen (--text_column chosen, if it is text)"
)


def _require_column(row: dict, column: str, setting: str) -> str:
    if column not in row:
        raise BadRow(
            f"has no column {column!r}, which {setting} names{did_you_mean(column, map(str, row))}; {_columns_of(row)}"
        )
    return column


def _only_column(row: dict, names: Sequence[str], setting: str) -> str:
    candidates = [name for name in names if name in row]
    if len(candidates) != 1:
        raise BadRow(
            f"has {len(candidates)} columns that could be the {setting}; name the right one with --{setting}; "
            f"{_columns_of(row)}"
        )
    return candidates[0]


def _columns_of(row: dict) -> str:
    return f"its columns: {', '.join(map(str, row)) or 'none'}"


def _why_no_text(row: dict, text_column: str) -> str:
    """Say why a row without ``text_column`` cannot be used, and what to do."""
    if any(not _is_empty(row.get(name)) for name in PREFERENCES):
        return _PREFERENCE
    known = _why_incomplete(row)
    if known is not None:
        return known
    example = shlex.quote(next((str(column) for column, value in row.items() if isinstance(value, str)), "X"))
    return (
        f"has no column {text_column!r}; {_columns_of(row)}{did_you_mean(text_column, map(str, row))}. Name the "
        f"column with the text, for instance --text_column {example}; or the columns of a question and its answer with "
        "--prompt_column and --response_column; or the column of a conversation with --messages_column"
    )


def _why_incomplete(row: dict) -> Optional[str]:
    """Say what is wrong with a row whose columns show which format was meant; None if they do not show it."""
    if "input_ids" in row:
        return (
            f"holds token ids (input_ids), but the commands read text and tokenize it; {_columns_of(row)}. Give the "
            "original text, or train on the token ids in Python, where a Trainer takes a dataset of such rows "
            "(docs/any_trainer.md)"
        )
    chat = next((name for name in CHAT_COLUMNS if name in row), None)
    if chat is not None:
        return f"column {chat!r} is empty instead of holding a conversation"
    capitalized = _why_capitalized(row)
    if capitalized is not None:
        return capitalized
    question = next((name for name in (*PROMPTS, *SOLE_PROMPTS) if not _is_empty(row.get(name))), None)
    if question is not None and not any(name in row for name in ANSWERS):
        return (
            f"has a question ({question}) and no answer ({', '.join(ANSWERS[:3])}, ...); {_columns_of(row)}. If the "
            "answer has another name, give it with --response_column"
        )
    if len(row) > 1 and all(_is_list_of_rows(value) for value in row.values()):
        return (
            f"is an object that holds several lists ({', '.join(map(str, row))}), not a row; write each list to its "
            f"own file, one object per line, for instance {next(iter(row))}.jsonl"
        )
    return None


def _why_capitalized(row: dict) -> Optional[str]:
    """Say what is wrong with a row whose columns have usual names, but not in lower case: Question, Answer."""
    usual, typed = ((*PROMPTS, *SOLE_PROMPTS), ANSWERS), {str(name).lower(): str(name) for name in row}
    prompt, answer = (next((typed[name] for name in names if name in typed), None) for names in usual)
    if prompt is None or answer is None:
        return None
    reason = f"has its question and answer in {prompt} and {answer}, but such names are recognized in lower case only; "
    beside = [typed[name] for name in (*CONTEXTS, *SYSTEMS) if typed.get(name) not in (None, name, prompt)]
    if not beside:
        return f"{reason}name them: --prompt_column {prompt} --response_column {answer}"
    renamed = ", ".join(f"{name} to {name.lower()}" for name in (*beside, prompt, answer) if name != name.lower())
    return f"{reason}{beside[0]} belongs to them and is not read under this name: rename {renamed}"


def _is_list_of_rows(value: Any) -> bool:
    """Whether ``value`` is a list of objects that are not messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict) and not {"role", "from"} & {*value[0]}


def _string(row: dict, column: str) -> str:
    value = row[column]
    if not isinstance(value, str):
        raise BadRow(f"column {column!r} holds {type(value).__name__}, not text{_advice_on_whole_table(row)}")
    return value


def _advice_on_whole_table(row: dict) -> str:
    """Return advice if ``row`` is a whole table, column by column, as pandas writes it by default; otherwise ""."""
    values = row.values()
    is_table = all(isinstance(value, list) for value in values) or all(
        isinstance(value, dict) and "0" in value for value in values
    )
    advice = (
        "; if each column holds the values of all rows, write one object per row, as pandas does with to_json(FILE, "
        "orient='records', lines=True)"
    )
    return advice if is_table else ""


def _is_empty(value: Any) -> bool:
    """Whether ``value`` is None, "", [], {}, or NaN, which tables use for None. 0 and False are not empty."""
    is_nan = isinstance(value, float) and value != value
    return value is None or is_nan or (isinstance(value, (str, list, dict, tuple)) and not value)
