"""Conversations -> token ids and which of them are learned."""

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
from scu_trainer.errors import DataError, nearest
from scu_trainer.run_files import read_regular
from scu_trainer.settings.data import CHAT_TEMPLATES

TEMPLATES = Path(__file__).with_name("templates")
MOST_TEMPLATE_BYTES = 2**20

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError)
"""A template is a program: it adds up, indexes and calls what a message lacks or holds."""

AROUND_ANSWERS = "with which it"
"""Begins what is said of words that a template leaves out around an answer."""

_WORDS = "x7Qz0J4k"
"""A mark among the words of a message: letters and digits, which no template escapes."""

_MARKER = re.compile(r"<\|[a-z_]+\|>|<(?:start|end)_of_turn>|\[/?INST\]")
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def read_chat_template(name: str) -> str:
    """The text of one of our templates, or of a template file. Raises DataError if there is no such one."""
    path = TEMPLATES / f"{name}.jinja" if name in CHAT_TEMPLATES else Path(name).expanduser()
    try:
        return read_regular(path, MOST_TEMPLATE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"chat_template {name!r} cannot be read: {error}{nearest(name, CHAT_TEMPLATES)}; give one of "
            f"{', '.join(CHAT_TEMPLATES)}, or the path of a Jinja file"
        ) from None


def spelled_markers(tokenizer, name: str) -> list[str]:
    """Markers of one of our templates that the tokenizer has no token for, and writes in several."""
    text = read_chat_template(name)
    markers = dict.fromkeys(_MARKER.findall(text))
    return [one for one in markers if len(tokenizer(one, add_special_tokens=False, verbose=False)["input_ids"]) > 1]


def changing_end(tokenizer) -> str:
    """The end of a prompt whose tokens are others where an answer follows than where the model is asked, as a BPE joins
    two line breaks or a blank to what stands behind them. Empty where the template takes no question."""
    turns = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": "an answer"}]
    render = _renderer(tokenizer, Chat(turns))
    try:
        texts = [render(turns[:1], add_generation_prompt=True), render(turns)]
    except BadRow:
        return ""
    asked, learned = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    apart = _shared(asked, learned)
    same, whole = tokenizer.decode(asked[:apart]), tokenizer.decode(asked)  # SentencePiece decodes a lone blank to ""
    return whole[len(same) :] if texts[1].startswith(texts[0]) else ""


def special_ids(tokenizer) -> set[int]:
    """With those that only the list of added tokens names, as the files of Llama 3 do with <|eot_id|>."""
    added = tokenizer.added_tokens_decoder.items()
    return {*tokenizer.all_special_ids, *(number for number, token in added if token.special)}


def chat_template_of(tokenizer, model_name: str) -> str:
    """Raises DataError if the tokenizer has no chat template."""
    try:
        return tokenizer.get_chat_template()
    except ValueError:
        raise DataError(
            f"the data holds conversations, but the tokenizer of {model_name} has no chat template; give one with "
            f"--chat_template NAME ({', '.join(CHAT_TEMPLATES)}) or a Jinja file, or use an instruction-tuned model"
        ) from None


class Encoded(NamedTuple):
    """Token ids, whether each is learned, the rendered text, and what the template leaves out around answers that are
    learned, in words."""

    ids: list[int]
    learned: list[bool]
    text: str
    left_out: tuple[str, ...] = ()


class _Span(NamedTuple):
    """Characters of the whole text that are learned. ``left_out``: as of ``Encoded``."""

    begin: int
    end: int
    left_out: tuple[str, ...] = ()


def encode_chat(tokenizer, template: str, chat: Chat, learn: str) -> Encoded:
    """``learn`` is "all", "assistant" (what the assistant says, with its end-of-turn marker) or "completion" (all after
    the prompt's turns; its answers alone where a turn is marked as not to be learned). Raises BadRow if the template
    refuses the conversation.
    """
    render = _renderer(tokenizer, chat)
    text = render(chat.messages)
    if learn == "all":
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return Encoded(ids, [True] * len(ids), text)
    has_marks = _GENERATION.search(template) is not None
    if learn == "assistant" and has_marks and not _has_weights(chat):
        return Encoded(*_by_generation_marks(tokenizer, chat), text)
    first = chat.prompt_turns or 0 if learn == "completion" else 0
    is_whole = learn == "completion" and not any(message.get("weight") == 0 for message in chat.messages[first:])
    if is_whole:
        turns = [(first, len(chat.messages))]
    else:
        turns = [(n, n + 1) for n, message in enumerate(chat.messages) if n >= first and is_answer(message)]
    try:
        spans = [_span(render, chat.messages, *turn, tokenizer.eos_token) for turn in turns]
    except BadRow:  # a template that ends only the last turn, such as ours, still marks its answers
        if has_marks and not is_whole:
            return Encoded(*_by_answers(tokenizer, chat, first), text)
        spans = [_span_by_words(render, chat.messages, *turn, tokenizer.eos_token) for turn in turns]
    ids, learned = _by_spans(tokenizer, text, spans)
    if has_marks and learn == "assistant":
        # A span goes on to the next turn: with the line break between them, which the template leaves out.
        learned = [*map(operator.and_, learned, _by_generation_marks(tokenizer, chat)[1])]
    return Encoded(ids, learned, text, tuple(dict.fromkeys(words for span in spans for words in span.left_out)))


def _renderer(tokenizer, chat: Chat):
    apply = functools.partial(tokenizer.apply_chat_template, tools=chat.tools, tokenize=False)
    known: dict[tuple[int, bool], str] = {}  # of beginnings of the conversation, which are asked for again and again

    def render(messages: list[dict], add_generation_prompt: bool = False) -> str:
        place = (len(messages), add_generation_prompt)
        is_beginning = all(map(operator.is_, messages, chat.messages))
        if is_beginning and place in known:
            return known[place]
        try:
            text = _with_arguments(apply, messages, add_generation_prompt=add_generation_prompt)
        except TEMPLATE_ERRORS as error:
            raise BadRow(f"the chat template refuses the conversation: {error}") from None
        if is_beginning:
            known[place] = text
        return text

    return render


def _with_arguments(apply, messages: list[dict], **options):
    """What a template makes of ``messages``: of arguments of calls as objects or, where it takes none (DeepSeek's adds
    them to a text), as JSON."""
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
    """Keys beside the usual ones (name, id, thought, ...) whose values change nothing in ``text``, what the template
    made of ``chat``."""
    render = _renderer(tokenizer, chat)

    def changes_nothing(key: str) -> bool:
        without = [{name: value for name, value in message.items() if name != key} for message in chat.messages]
        try:
            return render(without) == text
        except BadRow:  # it asks for the key
            return False

    held = [key for message in chat.messages for key, value in message.items() if value not in ("", [], {})]
    return tuple(key for key in dict.fromkeys(held) if key not in READ_KEYS and changes_nothing(key))


def _by_generation_marks(tokenizer, chat: Chat) -> tuple[list[int], list[bool]]:
    """By characters, as ``_by_spans``: ``return_assistant_tokens_mask`` leaves out all but the first token of a last
    character, and learns all that follows one which the tokenizer joins to that before it (NFC)."""
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(messages: list[dict]) -> tuple[list[str], list[list[tuple[int, int]]]]:
        return render_jinja_template(
            [messages],
            tools=chat.tools,
            chat_template=tokenizer.get_chat_template(tools=chat.tools),
            return_assistant_tokens_mask=True,
            **tokenizer.special_tokens_map,
        )

    [text], [marks] = _with_arguments(apply, chat.messages)
    return _by_spans(tokenizer, text, [_Span(*mark) for mark in marks])


def _by_answers(tokenizer, chat: Chat, first: int) -> tuple[list[int], list[bool]]:
    """By the marks of the template, without answers before turn ``first`` and those that are not to be learned. Raises
    BadRow where it does not show which these are."""
    ids, learned = _by_generation_marks(tokenizer, chat)
    runs = _runs(learned)
    for turn, message in enumerate(chat.messages):
        if message["role"] != "assistant" or (turn >= first and is_answer(message)):
            continue
        before, after = (_runs_until(tokenizer, chat, end) for end in (turn, turn + 1))
        if after != before + 1 or after > len(runs):
            raise BadRow(f"the chat template does not show which words are those of message {turn + 1}")
        begin, end = runs[before]
        learned[begin:end] = [False] * (end - begin)
    return ids, learned


def _runs_until(tokenizer, chat: Chat, end: int) -> int:
    """Marked parts of a conversation that ends before turn ``end``."""
    return len(_runs(_by_generation_marks(tokenizer, chat._replace(messages=chat.messages[:end]))[1])) if end else 0


def _runs(learned: list[bool]) -> list[tuple[int, int]]:
    """Where parts that are learned begin and end."""
    flags = [False, *learned, False]
    edges = [place for place in range(len(learned) + 1) if flags[place] != flags[place + 1]]
    return list(zip(edges[::2], edges[1::2], strict=True))


def _has_weights(chat: Chat) -> bool:
    """Whether an answer is not to be learned: a weight of 0, as OpenAI's files have it. Questions never are."""
    return any(message["role"] == "assistant" and not is_answer(message) for message in chat.messages)


def _span(render, messages: list[dict], first: int, end: int, eos: str | None) -> _Span:
    """Characters of the whole text that ``messages[first:end]`` fill, by the difference of two renderings."""
    whole, after = render(messages), render(messages[:end])
    if not whole.startswith(after):
        after = _unfinished(render, messages[:end], eos)[0]
    before = render(messages[:first], add_generation_prompt=True) if first else _start(render, messages[:end], eos)
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
    """As ``_span``, also where a template renders a turn otherwise once more follows (Qwen3 leaves its reasoning out),
    or asks for an answer with words that it puts before none ("<think>", DeepSeek R1): by what stands between the words
    of the message before and those of the answer, and behind these, in the whole text as where the model is asked."""
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
    """Where an answer begins in ``whole``, and what the prompt for it has beyond what is before its words."""
    asked = render(messages[:first], add_generation_prompt=True)
    header = asked[_place(asked, lambda cut: render(cut, True), messages[:first], first - 1) :]
    before = _place(whole, render, messages, first - 1)
    if header and whole.startswith(header, before):
        return before + len(header), ""
    between = whole[before : _beginning(whole, render, messages, first)]
    shared = _shared(between, header)
    if not shared:
        raise _not_found()
    return before + shared, header[shared:].strip() if shared == len(between) else ""


def _end_by_words(whole: str, render, messages: list[dict], end: int, eos: str | None) -> tuple[int, str]:
    """Where the answer before message ``end`` ends in ``whole``; and its own end, where it has another one there, as
    gpt-oss ends answers of the past: the model is not to say that, and it is not learned."""
    last, alone = _place(whole, render, messages, end - 1), render(messages[:end])
    rest = alone[_place(alone, render, messages[:end], end - 1) :]
    for own_end in (rest, rest.removesuffix(eos or "")):
        if whole.startswith(own_end, last) and (own_end or not rest):
            return last + len(own_end), ""
    if messages[end - 1].get("tool_calls"):  # they are behind its words
        raise _not_found()
    return last, rest.strip()


def _shared(one: Sequence, other: Sequence) -> int:
    """How long the beginning is in which both are alike."""
    apart = (place for place, (left, right) in enumerate(zip(one, other, strict=False)) if left != right)
    return next(apart, min(len(one), len(other)))


def _place(text: str, render, messages: list[dict], turn: int) -> int:
    """Where the words of message ``turn``, or the name of its last call, end in ``text``, which ``render`` makes of
    ``messages``. Raises BadRow where a mark behind them changes more than itself."""
    marked = [*messages]
    marked[turn] = message = copy.deepcopy(messages[turn])
    content, calls = message.get("content", ""), message.get("tool_calls")
    is_call = calls and not content.strip()
    if is_call:
        calls[-1]["function"]["name"] += _WORDS
    elif content.strip() or message["role"] != "assistant":
        end = len(content.rstrip())
        message["content"] = content[:end] + _WORDS + content[end:]
    else:
        raise _not_found()
    before, found, after = render(marked).partition(_WORDS)
    after = after.replace(_WORDS, "") if is_call else after  # gpt-oss names it again, in front of what the tool says
    if not found or before + after != text:
        raise _not_found()
    return len(before)


def _beginning(text: str, render, messages: list[dict], turn: int) -> int:
    """Where the words of message ``turn`` begin behind their reasoning, or would before its calls; as ``_place``."""
    content = messages[turn].get("content", "")
    answer = content.rpartition("</think>")[2].lstrip()
    marked = [*messages]
    marked[turn] = {**messages[turn], "content": content.removesuffix(answer) + _WORDS + answer}
    before, found, _ = render(marked).partition(_WORDS)
    if not found or not text.startswith(before):
        raise _not_found()
    return len(before)


def _unfinished(render, messages: list[dict], eos: str | None) -> tuple[str, str]:
    """A conversation without the ``eos`` that a template, such as that of Phi 3.5, puts behind one that is over; and
    with the prompt for an answer, where no such end stands. One that stands there, too, is the end of the turn."""
    text, asked = render(messages), render(messages, add_generation_prompt=True)
    return text if asked.startswith(text) else text.removesuffix(eos or ""), asked


def _start(render, messages: list[dict], eos: str | None) -> str:
    """What stands before the words of a conversation that begins with the assistant: a template renders no empty
    conversation, so its own mark for the assistant says where the words begin."""
    text, asked = _unfinished(render, messages, eos)
    mark = asked[len(text) :]
    begin = text.find(mark) if mark.strip() else -1
    if begin < 0:
        raise BadRow(
            "begins with a turn of the assistant, and the chat template does not show where its words begin; put a "
            "turn of the user before it, take it out, or learn all tokens with --assistant_only_loss false"
        )
    return text[: begin + len(mark)]


def _by_spans(tokenizer, text: str, spans: list[_Span]) -> tuple[list[int], list[bool]]:
    if not tokenizer.is_fast:
        raise DataError(
            "this tokenizer does not report which characters a token covers (it is not a fast tokenizer), so the "
            "answers alone cannot be learned; set --assistant_only_loss false --completion_only_loss false"
        )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [any(begin < span.end and end > span.begin for span in spans) for begin, end in encoded["offset_mapping"]]
    return encoded["input_ids"], learned
