"""Encode conversations as token ids, and find which of these tokens are learned."""

from __future__ import annotations

import copy
import functools
import json
import operator
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jinja2

from scu_trainer.data.messages import READ_KEYS, is_answer
from scu_trainer.data.records import BadRow, Chat
from scu_trainer.errors import DataError, did_you_mean
from scu_trainer.run_files import read_regular
from scu_trainer.settings.data import CHAT_TEMPLATES

TEMPLATES = Path(__file__).with_name("templates")
MOST_TEMPLATE_BYTES = 2**20

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError)
"""A template is a program: a missing key or an unexpected type in a message can make it raise any of these."""

AROUND_ANSWERS = "with which it"
"""Marks the entries of ``Encoded.left_out``, which describe words that a template leaves out around an answer."""

_SENTINEL = "x7Qz0J4k"
"""Inserted into a message to find its place in the rendered text: letters and digits, which no template escapes."""

_MARKER = re.compile(r"<\|[a-z_]+\|>|<(?:start|end)_of_turn>|\[/?INST\]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def read_chat_template(name: str) -> str:
    """Return the text of one of our templates, or of a template file. Raises DataError if it cannot be read."""
    path = TEMPLATES / f"{name}.jinja" if name in CHAT_TEMPLATES else Path(name).expanduser()
    try:
        return read_regular(path, MOST_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"chat_template {name!r} cannot be read: {error}{did_you_mean(name, CHAT_TEMPLATES)}; give one of "
            f"{', '.join(CHAT_TEMPLATES)}, or the path of a Jinja file"
        ) from None


def spelled_markers(tokenizer, name: str) -> list[str]:
    """Return the markers of one of our templates for which the tokenizer needs several tokens."""
    text = read_chat_template(name)
    markers = dict.fromkeys(_MARKER.findall(text))
    return [mark for mark in markers if len(tokenizer(mark, add_special_tokens=False, verbose=False)["input_ids"]) > 1]


def unstable_prompt_end(tokenizer) -> str:
    """Return the end of a prompt that is tokenized differently in training, where an answer follows, than in inference:
    a BPE tokenizer may join two line breaks, or a blank, to the text that follows. Returns "" if there is no such end,
    or if the template refuses the example or renders its prompt differently before an answer."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    render = _renderer(tokenizer, Chat(turns))
    try:
        texts = [render(turns[:1], add_generation_prompt=True), render(turns)]
    except BadRow:
        return ""
    asked, learned = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    shared = _shared_length(asked, learned)
    same, whole = tokenizer.decode(asked[:shared]), tokenizer.decode(asked)  # SentencePiece decodes a lone blank to ""
    return whole[len(same) :] if texts[1].startswith(texts[0]) else ""


def special_ids(tokenizer) -> set[int]:
    """Return the ids of all special tokens, also of those only in the list of added tokens, as Llama 3's <|eot_id|>."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}


def chat_template_of(tokenizer, model_name: str) -> str:
    """Return the chat template of the tokenizer. Raises DataError if it has none."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise DataError(
            f"the data holds conversations, but the tokenizer of {model_name} has no chat template; give one with "
            f"--chat_template NAME ({', '.join(CHAT_TEMPLATES)}) or a Jinja file, or use an instruction-tuned model"
        ) from None


class Encoded(NamedTuple):
    """Token ids, whether each is learned, the rendered text, and, in words, what it lacks around learned answers."""

    ids: list[int]
    learned: list[bool]
    text: str
    left_out: tuple[str, ...] = ()


class _Span(NamedTuple):
    """A range of characters of the rendered text that is learned. ``left_out``: as in ``Encoded``."""

    begin: int
    end: int
    left_out: tuple[str, ...] = ()


def encode_chat(tokenizer, template: str, chat: Chat, learn: str) -> Encoded:
    """``learn`` is "all", "assistant" (the assistant's answers with their end-of-turn markers) or "completion" (all
    turns after the prompt; only the answers among them if one has a weight of 0). Raises BadRow if the template refuses
    the conversation or the learned tokens cannot be found, DataError if these need a fast tokenizer."""
    render = _renderer(tokenizer, chat)
    text = render(chat.messages)
    if learn == "all":
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Encoded(ids, [True] * len(ids), text)
    has_marks = _GENERATION.search(template) is not None
    if learn == "assistant" and has_marks and not _has_unlearned_answer(chat):
        return Encoded(*_by_generation_marks(tokenizer, chat), text)
    first = chat.prompt_turns or 0 if learn == "completion" else 0
    is_whole = learn == "completion" and not any(message.get("weight") == 0 for message in chat.messages[first:])
    if is_whole:
        turns = [(first, len(chat.messages))]
    else:
        turns = [(n, n + 1) for n, message in enumerate(chat.messages) if n >= first and is_answer(message)]
    try:
        spans = [_span(render, chat.messages, *turn, tokenizer.eos_token) for turn in turns]
    except BadRow:  # a template that adds an end only to the last turn, such as ours, still marks its answers
        if has_marks and not is_whole:
            return Encoded(*_by_answers(tokenizer, chat, first), text)
        spans = [_span_by_words(render, chat.messages, *turn, tokenizer.eos_token) for turn in turns]
    ids, learned = _by_spans(tokenizer, text, spans)
    if has_marks and learn == "assistant":
        # A span extends to the next turn and includes the line break between them, which the template does not mark.
        learned = [*map(operator.and_, learned, _by_generation_marks(tokenizer, chat)[1])]
    return Encoded(ids, learned, text, tuple(dict.fromkeys(words for span in spans for words in span.left_out)))


def _renderer(tokenizer, chat: Chat):
    """Return a function that renders messages with the tools of ``chat``, and caches beginnings of ``chat``."""
    apply = functools.partial(tokenizer.apply_chat_template, tools=chat.tools, tokenize=False)
    known: dict[tuple[int, bool], str] = {}  # beginnings of the conversation are rendered many times

    def render(messages: list[dict], add_generation_prompt: bool = False) -> str:
        place = (len(messages), add_generation_prompt)
        is_beginning = all(map(operator.is_, messages, chat.messages))
        if is_beginning and place in known:
            return known[place]
        try:
            text = _apply_to_calls(apply, messages, add_generation_prompt=add_generation_prompt)
        except TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from None
        if is_beginning:
            known[place] = text
        return text

    return render


def _apply_to_calls(apply, messages: list[dict], **options):
    """Render ``messages`` with the arguments of calls as objects, or as JSON if the template fails on objects, as
    DeepSeek's does, which concatenates them with text."""
    try:
        return apply(messages, **options)
    except TypeError:
        return apply([*map(_with_json_calls, messages)], **options)


def _with_json_calls(message: dict) -> dict:
    if "tool_calls" not in message:
        return message
    calls = copy.deepcopy(message["tool_calls"])
    for call in calls:
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**message, "tool_calls": calls}


def keys_left_out(tokenizer, chat: Chat, text: str) -> tuple[str, ...]:
    """Return the keys of messages that the template ignores (name, id, thought, ...), but for those of READ_KEYS."""
    render = _renderer(tokenizer, chat)

    def changes_nothing(key: str) -> bool:
        without = [{name: value for name, value in message.items() if name != key} for message in chat.messages]
        try:
            return render(without) == text
        except BadRow:  # the template needs the key
            return False

    filled = [key for message in chat.messages for key, value in message.items() if value not in ("", [], {})]
    return tuple(key for key in dict.fromkeys(filled) if key not in READ_KEYS and changes_nothing(key))


def _by_generation_marks(tokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """Return token ids and a mask of the tokens inside the template's ``{% generation %}`` blocks. It is made from
    characters, because ``return_assistant_tokens_mask`` of transformers is wrong in two cases: if several tokens form
    the last character, it marks only the first; if the tokenizer joins a character to the one before it (NFC), it
    marks everything that follows."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(messages: list[dict]) -> tuple[list[str], list[list[tuple[int, int]]]]:
        return render_jinja_template(
            [messages],
            tools=chat.tools,
            chat_template=tokenizer.get_chat_template(tools=chat.tools),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )

    [text], [marks] = _apply_to_calls(apply, chat.messages)
    return _by_spans(tokenizer, text, [_Span(*mark) for mark in marks])


def _by_answers(tokenizer, chat: Chat, first: int) -> tuple[list[int], list[bool]]:
    """As ``_by_generation_marks``, but without answers before turn ``first`` and those with a weight of 0. Raises
    BadRow if the marks do not show which tokens these are."""
    ids, learned = _by_generation_marks(tokenizer, chat)
    runs = _runs(learned)
    for turn, message in enumerate(chat.messages):
        if message["role"] != "assistant" or (turn >= first and is_answer(message)):
            continue
        before, after = (_marked_runs_before(tokenizer, chat, end) for end in (turn, turn + 1))
        if after != before + 1 or after > len(runs):
            raise BadRow(f"the chat template does not show which words are those of message {turn + 1}")
        begin, end = runs[before]
        learned[begin:end] = [False] * (end - begin)
    return ids, learned


def _marked_runs_before(tokenizer, chat: Chat, end: int) -> int:
    """Return the number of marked runs in the turns before ``end``."""
    return len(_runs(_by_generation_marks(tokenizer, chat._replace(messages=chat.messages[:end]))[1])) if end else 0


def _runs(learned: list[bool]) -> list[tuple[int, int]]:
    """Return (begin, end) of each run of learned tokens."""
    flags = [False, *learned, False]
    edges = [place for place in range(len(learned) + 1) if flags[place] != flags[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _has_unlearned_answer(chat: Chat) -> bool:
    """Whether an answer is excluded from learning by a weight of 0, as in OpenAI's files."""
    return any(message["role"] == "assistant" and not is_answer(message) for message in chat.messages)


def _span(render, messages: list[dict], first: int, end: int, eos: str | None) -> _Span:
    """Return the characters of ``messages[first:end]`` in the whole text, as the difference of two renderings."""
    whole, after = render(messages), render(messages[:end])
    if not whole.startswith(after):
        after = _without_end(render, messages[:end], eos)[0]
    before = render(messages[:first], add_generation_prompt=True) if first else _opening(render, messages[:end], eos)
    if not (after.startswith(before) and whole.startswith(after)):
        raise _not_found()
    return _Span(len(before), len(after))


def _not_found() -> BadRow:
    return BadRow(
        "the chat template renders the start of the conversation differently when more follows, so the learned "
        "tokens cannot be found; mark the assistant's words with {% generation %} in the template, or learn all "
        "tokens with --assistant_only_loss false --completion_only_loss false"
    )


def _span_by_words(render, messages: list[dict], first: int, end: int, eos: str | None) -> _Span:
    """As ``_span``, but also for templates that render a turn differently when more turns follow (Qwen3 leaves out the
    reasoning of earlier turns), or whose generation prompt ends in words that no rendered answer follows ("<think>" of
    DeepSeek R1). Compares the text between the words of the previous message and those of the answer, and the text
    after the answer, in the whole conversation and where the model is prompted."""
    try:
        return _span(render, messages, first, end, eos)
    except BadRow:
        if first == 0:
            raise
    whole = render(messages)
    begin, asked_with = _begin_by_words(whole, render, messages, first)
    last, ends_with = _end_by_words(whole, render, messages, end, eos)
    left_out = [asked_with and f"{asked_with!r}, {AROUND_ANSWERS} asks for an answer"]
    left_out += [ends_with and f"{ends_with!r}, {AROUND_ANSWERS} ends an answer"]
    return _Span(begin, last, tuple(filter(None, left_out)))


def _begin_by_words(whole: str, render, messages: list[dict], first: int) -> tuple[int, str]:
    """Return where answer ``first`` begins in ``whole``, and the part of its generation prompt that is not there."""
    asked = render(messages[:first], add_generation_prompt=True)
    header = asked[_end_of_words(asked, lambda cut: render(cut, True), messages[:first], first - 1) :]
    before = _end_of_words(whole, render, messages, first - 1)
    if header and whole.startswith(header, before):
        return before + len(header), ""
    between = whole[before : _begin_of_words(whole, render, messages, first)]
    shared = _shared_length(between, header)
    if not shared:
        raise _not_found()
    return before + shared, header[shared:].strip() if shared == len(between) else ""


def _end_by_words(whole: str, render, messages: list[dict], end: int, eos: str | None) -> tuple[int, str]:
    """Return where the answer before message ``end`` ends in ``whole``, and its end marker if that is missing there.
    gpt-oss ends earlier answers with another marker, which the model must not generate, so it is not learned."""
    last, cut = _end_of_words(whole, render, messages, end - 1), render(messages[:end])
    rest = cut[_end_of_words(cut, render, messages[:end], end - 1) :]
    for own_end in (rest, rest.removesuffix(eos or "")):
        if whole.startswith(own_end, last) and (own_end or not rest):
            return last + len(own_end), ""
    if messages[end - 1].get("tool_calls"):  # they follow the words of the message
        raise _not_found()
    return last, rest.strip()


def _shared_length(first: Sequence, second: Sequence) -> int:
    """Return the length of the common prefix."""
    differing = (place for place, (left, right) in enumerate(zip(first, second, strict=False)) if left != right)
    return next(differing, min(len(first), len(second)))


def _end_of_words(text: str, render, messages: list[dict], turn: int) -> int:
    """Return where the words of message ``turn``, or the name of its last call, end in ``text``, the rendering of
    ``messages``. Raises BadRow if inserting ``_SENTINEL`` after them changes anything else in the text."""
    marked = [*messages]
    marked[turn] = message = copy.deepcopy(messages[turn])
    content, calls = message.get("content", ""), message.get("tool_calls")
    is_call = calls and not content.strip()
    if is_call:
        calls[-1]["function"]["name"] += _SENTINEL
    elif content.strip() or message["role"] != "assistant":
        end = len(content.rstrip())
        message["content"] = content[:end] + _SENTINEL + content[end:]
    else:
        raise _not_found()
    before, found, after = render(marked).partition(_SENTINEL)
    after = after.replace(_SENTINEL, "") if is_call else after  # gpt-oss repeats the name before the tool's result
    if not found or before + after != text:
        raise _not_found()
    return len(before)


def _begin_of_words(text: str, render, messages: list[dict], turn: int) -> int:
    """Return where the words of message ``turn`` begin in ``text``, after its reasoning and before its calls. Raises
    BadRow as ``_end_of_words`` does."""
    content = messages[turn].get("content", "")
    answer = content.rpartition("</think>")[2].lstrip()
    marked = [*messages]
    marked[turn] = {**messages[turn], "content": content.removesuffix(answer) + _SENTINEL + answer}
    before, found, _ = render(marked).partition(_SENTINEL)
    if not found or not text.startswith(before):
        raise _not_found()
    return len(before)


def _without_end(render, messages: list[dict], eos: str | None) -> tuple[str, str]:
    """Render a conversation without and with a generation prompt. An ``eos`` that the template puts only after a whole
    conversation, as that of Phi 3.5 does, is removed. If the second text has it too, it ends the turn and stays."""
    text, asked = render(messages), render(messages, add_generation_prompt=True)
    return text if asked.startswith(text) else text.removesuffix(eos or ""), asked


def _opening(render, messages: list[dict], eos: str | None) -> str:
    """Return the text before the words of a conversation that begins with the assistant. A template cannot render an
    empty conversation, so its generation prompt shows where the words begin."""
    text, asked = _without_end(render, messages, eos)
    mark = asked[len(text) :]
    begin = text.find(mark) if mark.strip() else -1
    if begin < 0:
        raise BadRow(
            "begins with a turn of the assistant, and the chat template does not show where its words begin; put a "
            "turn of the user before it, remove it, or learn all tokens with --assistant_only_loss false"
        )
    return text[: begin + len(mark)]


def _by_spans(tokenizer, text: str, spans: list[_Span]) -> tuple[list[int], list[bool]]:
    """Return the token ids of ``text``, and which of them overlap a span. Raises DataError for a slow tokenizer."""
    if not tokenizer.is_fast:
        raise DataError(
            "this tokenizer does not report which characters a token covers (it is not a fast tokenizer), so it is not "
            "possible to learn only the answers; set --assistant_only_loss false --completion_only_loss false"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [any(begin < span.end and end > span.begin for span in spans) for begin, end in encoded["offset_mapping"]]
    return encoded["input_ids"], learned
