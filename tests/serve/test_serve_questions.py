"""Who may ask and for what: the layers around the server of transformers, asked in this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from threading import Event
from typing import Any, Optional

import httpx
import pytest
import torch

from scu_trainer.data.messages import messages_of
from scu_trainer.listening import allowed_hosts
from scu_trainer.serve.errors import FAILED
from scu_trainer.serve.front import MOST_BYTES, _replay
from scu_trainer.serve.guard import CHAT, COMPLETIONS, HEALTH, MODELS, RequestGuard
from scu_trainer.serve.questions import RequestReader
from scu_trainer.serve.transformers_server import application
from scu_trainer.settings import ModelSettings
from scu_trainer.talk.answers import AnswerSettings
from scu_trainer.talk.model import Talker, load_talker
from tests import tiny
from tests.faults import CPU_TEXT, oom
from tests.tiny import end_every_text

HOST, KEY = "127.0.0.1:8000", "a-key-of-this-test"
BEARER = {"Authorization": f"Bearer {KEY}"}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


def load(folder, **changes) -> Talker:
    return load_talker("tiny", ModelSettings(model_name_or_path=str(folder), tuning="full", dtype="float32"), **changes)


@pytest.fixture
def talker(folder):
    return load(folder)


class Site:
    def __init__(self, talker: Talker, hosts: Optional[Sequence[str]] = (HOST,), key: Optional[str] = None) -> None:
        self.talker, self.ends = talker, Event()
        self.app = RequestGuard(
            application(RequestReader(talker, "tiny", AnswerSettings(max_new_tokens=8)), self.ends), hosts, key
        )

    def ask(self, path: str, method: str = "GET", headers: Any = None, **given: Any) -> httpx.Response:
        async def ask() -> httpx.Response:
            transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url=f"http://{HOST}") as client:
                return await client.request(method, path, headers=headers, **given)

        return asyncio.run(ask())

    def post(self, path: str = CHAT, **body: Any) -> httpx.Response:
        asked = {"messages": HELLO} if path == CHAT else {"prompt": "hello"}
        return self.ask(path, "POST", json={"model": "tiny", **asked, **body})


@pytest.fixture
def site(talker) -> Site:
    return Site(talker)


# -- the guard ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "another name": (MODELS, "GET", {"Host": "evil.example:8000"}, 421),
    "another port": (MODELS, "GET", {"Host": "127.0.0.1:80"}, 421),
    "two names": (MODELS, "GET", [("Host", HOST), ("Host", HOST)], 421),
    "another page": (MODELS, "GET", {"Origin": "http://evil.example"}, 403),
    "a page of a file": (MODELS, "GET", {"Origin": "null"}, 403),
    "a page that asks whether it may": (CHAT, "OPTIONS", {"Origin": "http://evil.example"}, 403),
    "loading": ("/load_model", "POST", {}, 404),
    "forgetting": ("/reset", "POST", {}, 404),
    "another interface": ("/v1/responses", "POST", {}, 404),
    "the pages of FastAPI": ("/docs", "GET", {}, 404),
    "another method": (CHAT, "GET", {}, 405),
    "of another route": (MODELS, "OPTIONS", {}, 405),
    "the head of an answer": (CHAT, "HEAD", {}, 405),
}


@pytest.mark.parametrize("path, method, headers, status", REFUSED.values(), ids=REFUSED)
def test_what_is_refused(site, path, method, headers, status):
    answer = site.ask(path, method, headers)
    assert answer.status_code == status
    if method == "HEAD":
        return
    assert answer.json()["error"]["type"] == "invalid_request_error" and answer.json()["error"]["message"]
    assert "access-control-allow-origin" not in answer.headers


def test_its_own_names_and_pages_are_answered(site):
    assert site.ask(MODELS).status_code == site.ask(MODELS, headers={"Origin": f"http://{HOST}"}).status_code == 200
    assert site.ask(HEALTH).json() == {"status": "ok"}
    assert site.ask(HEALTH, "HEAD").status_code == site.ask(MODELS, "HEAD").status_code == 200, "monitors ask so"


def test_one_model_is_found_by_its_name(site):
    assert site.ask(f"{MODELS}/tiny").json() == site.ask(MODELS).json()["data"][0]
    answer = site.ask(f"{MODELS}/tinny")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "model_not_found"
    assert "did you mean 'tiny'?" in answer.json()["error"]["message"]
    assert site.ask(f"{MODELS}/tiny", "DELETE").status_code == 405


def test_the_names_of_an_address():
    assert allowed_hosts("127.0.0.1", 8000) == {HOST, "localhost:8000"}
    assert allowed_hosts("::1", 80) >= {"[::1]:80", "[::1]", "localhost"} and allowed_hosts("192.0.2.7", 1) == {
        "192.0.2.7:1"
    }


NO_KEY = {
    "none": {},
    "another one": {"Authorization": "Bearer another-key-of-this-test"},
    "a part of it": {"Authorization": f"Bearer {KEY[:-1]}"},
    "nothing": {"Authorization": "Bearer "},
    "letters of no alphabet here": {"Authorization": "Bearer ключ".encode()},
    "another scheme": {"Authorization": f"Basic {KEY}"},
}


@pytest.mark.parametrize("headers", NO_KEY.values(), ids=NO_KEY)
@pytest.mark.parametrize("hosts", [(HOST,), None], ids=["loopback", "network"])
def test_without_its_key_nothing_but_its_health_is_answered(talker, hosts, headers):
    site = Site(talker, hosts, KEY)
    for path, method in ((MODELS, "GET"), (CHAT, "POST"), (COMPLETIONS, "POST"), ("/load_model", "POST")):
        answer = site.ask(path, method, headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in answer.text and "after the word Bearer" in answer.text
    assert site.ask(HEALTH, headers=headers).status_code == 200


def test_with_its_key_by_any_name_where_other_machines_may_ask(talker):
    site = Site(talker, None, KEY)
    assert site.ask(MODELS, headers={**BEARER, "Host": "gpu-7.example:8000"}).status_code == 200
    assert Site(talker, [HOST], KEY).ask(MODELS, headers={**BEARER, "Host": "gpu-7.example:8000"}).status_code == 421


def test_a_web_socket_is_closed(site):
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(site.app({"type": "websocket", "path": "/", "headers": []}, None, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


# -- questions ---------------------------------------------------------------------------------------------------------

WRONG = {
    "no model": ({"model": None}, 400, "model", "model is missing"),
    "another model": ({"model": "Tiny"}, 404, "model", "there is no model 'Tiny' here, only tiny"),
    "a model of the Hub": ({"model": "gpt2@main"}, 404, "model", "there is no model"),
    "no messages": ({"messages": []}, 400, "messages", "one or more messages"),
    "a message without a role": ({"messages": [{"content": "x"}]}, 400, "messages[0]", "role and content"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        400, "messages[0]", "parts of type text",
    ),
    "a call": ({"messages": [{"role": "assistant", "tool_calls": [1]}]}, 400, "messages[0]", "has tool_calls"),
    "tools": ({"tools": [{"type": "function"}]}, 400, "tools", "tools is not offered"),
    "many answers": ({"n": 2}, 400, "n", "n is not offered"),
    "probabilities": ({"logprobs": True}, 400, "logprobs", "not offered"),
    "a form": ({"response_format": {"type": "json_object"}}, 400, "response_format", "not offered"),
    "a penalty": ({"frequency_penalty": 0.5}, 400, "frequency_penalty", "not offered"),
    "its own configuration": ({"generation_config": "{}"}, 400, "generation_config", "not offered"),
    "another template": ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs", "not offered"),
    "a word for a number": ({"temperature": "hot"}, 400, "temperature", "must be a number"),
    "a switch for a number": ({"max_tokens": True}, 400, "max_tokens", "must be a whole number"),
    "two lengths": ({"max_tokens": 3, "max_completion_tokens": 4}, 400, "max_tokens", "differ; send one"),
    "no tokens": ({"max_tokens": 0}, 400, None, "max_tokens is 0; it must be 1 or more"),
    "below zero": ({"temperature": -1}, 400, None, "temperature is -1"),
    "no number": ({"temperature": float("nan")}, 400, None, "temperature is nan"),
    "more than a number holds": ({"temperature": 10**400}, 400, "temperature", "too large"),
    "half of a character": ({"prompt": "\ud83d"}, 400, None, "contains half of a character"),
    "a share above one": ({"top_p": 2}, 400, None, "top_p is 2"),
    "a seed too large": ({"seed": 2**64}, 400, "seed", "64 bits"),
    "a word for a switch": ({"stream": "yes"}, 400, "stream", "true or false"),
    "stops that are none": ({"stop": ["a", 1]}, 400, "stop", "a string or a list of strings"),
    "too many stops": ({"stop": [*"abcde"]}, 400, "stop", "up to 4 strings of up to 64 letters"),
    "a stop that is compared for minutes": ({"stop": "a" * 65}, 400, "stop", "up to 4 strings of up to 64 letters"),
    "no answers": ({"n": 0}, 400, "n", "n is not offered"),
    "the probability of each token": ({"logprobs": 0}, 400, "logprobs", "not offered"),
    "a number that logits cannot be divided by": ({"temperature": 1e-320}, 400, None, "the lowest is 1e-30"),
    "a text beside messages": ({"prompt": "hello"}, 400, "prompt", "/v1/chat/completions takes no prompt"),
    "a name that the template leaves out": (
        {"messages": [{"role": "user", "content": "x", "name": "Ann"}]}, 400, "messages", "tiny would not see name",
    ),
    "a name that is none": ({"messages": [{"role": "user", "content": "x", "name": 7}]}, 400, "messages[0]", ".name"),
    "too long": ({"messages": [{"role": "user", "content": "x " * 200}]}, 400, "messages", "128 positions"),
}  # fmt: skip


@pytest.mark.parametrize("body, status, param, said", WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_as_openai_says_it(site, body, status, param, said):
    given = json.dumps({"model": "tiny", "messages": HELLO, **body})
    answer = site.ask(CHAT, "POST", content=given)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, param) and said in error["message"]
    assert error["type"] == "invalid_request_error" and {*error} == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b"\xff", b"[" * 10_000], ids=["none", "list", "torn", "bytes", "deep"]
)
def test_a_body_that_is_no_object(site, content):
    answer = site.ask(CHAT, "POST", content=content)
    assert answer.status_code == 400 and "the body is not " in answer.json()["error"]["message"]


def test_a_body_that_is_too_large(site):
    assert site.ask(CHAT, "POST", content=b" " * (MOST_BYTES + 1)).status_code == 413


@pytest.mark.parametrize("prompt", ["", None, ["a", "b"], [1, 2], 7])
def test_a_prompt_that_is_none(talker, prompt):
    talker.tokenizer.add_bos_token = False
    assert Site(talker).post(COMPLETIONS, prompt=prompt).status_code == 400


def test_what_asks_for_nothing_is_no_mistake(site):
    neutral = {"n": 1, "tools": [], "logprobs": False, "frequency_penalty": 0, "response_format": {"type": "text"}}
    neutral |= {"prompt_cache_key": "mine"}
    neutral |= {"user": "me", "stream_options": {"include_usage": True}, "logit_bias": {}, "tool_choice": None}
    parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
    assert site.post(**neutral).json()["choices"] == site.post(messages=parts).json()["choices"]


def test_parts_of_a_message_are_joined_as_a_training_joins_them(site):
    parts = [{"type": "text", "text": text} for text in ("hel", "lo")]
    messages = [{"role": "user", "content": parts}]
    answers = [site.post(**given).json()["usage"]["prompt_tokens"] for given in ({}, {"messages": messages})]
    assert answers[0] == answers[1] and messages_of(messages, "messages")[0]["content"] == "hello"


def test_a_text_goes_on_where_the_tokenizer_ends_every_text(folder):
    site = Site(load(folder))
    before = site.post(COMPLETIONS).json()
    end_every_text(site.talker.tokenizer)
    now = site.post(COMPLETIONS).json()
    assert (now["choices"], now["usage"]) == (before["choices"], before["usage"])


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
def test_a_whole_number_is_a_number(site, field):
    asked = [site.post(**{field: value}, seed=1).json() for value in (2, 2.0)]
    assert asked[0]["choices"] == asked[1]["choices"]


def test_the_reasoning_of_an_answer_may_be_sent_back_and_is_rendered(site, talker):
    answered = [*HELLO, {"role": "assistant", "content": "yes", "reasoning_content": "they greet"}, *HELLO]
    rendered = len(talker.encoded(answered))
    assert site.post(messages=answered).json()["usage"]["prompt_tokens"] == rendered
    answered[1].pop("reasoning_content")
    assert len(talker.encoded(answered)) < rendered


TEMPLATE = "{% for message in messages if message.role in ('user', 'assistant') %}{{ message.content }}{% endfor %}"
NAMED = "{% for message in messages %}{{ message.name }}: {{ message.content }}{% endfor %}"


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "none"])
def test_what_the_model_would_not_see_is_refused(talker, template):
    talker.tokenizer.chat_template, site = template, Site(talker)
    thought = [*HELLO, {"role": "assistant", "content": "yes", "reasoning_content": "they greet"}, *HELLO]
    refused = site.post(messages=thought)
    assert refused.status_code == 400 and "tiny would not see reasoning" in refused.json()["error"]["message"]
    brief = site.post(messages=[{"role": "developer", "content": "be brief"}, *HELLO])
    assert (brief.status_code == 200) == (template is None), "without a template all texts are gone on with"
    assert template is None or "words of the role 'developer'" in brief.json()["error"]["message"]


def test_what_a_template_renders_or_leaves_out_by_design_is_taken(talker):
    talker.tokenizer.chat_template = NAMED
    assert Site(talker).post(messages=[{**HELLO[0], "name": "Ann"}]).status_code == 200
    talker.tokenizer.chat_template = TEMPLATE + "{% if not messages %}{{ messages[0].reasoning_content }}{% endif %}"
    thought = [*HELLO, {"role": "assistant", "content": "yes", "reasoning_content": "they greet"}, *HELLO]
    assert Site(talker).post(messages=thought).status_code == 200, "as Qwen3 does with turns before the last"
    talker.tokenizer.chat_template = (
        "{% for message in messages %}{{ message.content.split('</think>')[-1] }}{% endfor %}"
    )
    thought = [*HELLO, {"role": "assistant", "content": "<think>they greet</think>yes"}, *HELLO]
    assert Site(talker).post(messages=thought).status_code == 200, "as DeepSeek-R1 and QwQ do"


def test_what_draws_from_all_tokens_does_not_make_a_greedy_server_draw(talker):
    greedy = Site(talker).post().json()["choices"]
    assert Site(talker).post(top_p=1, top_k=0).json()["choices"] == greedy
    reader = RequestReader(talker, "tiny", AnswerSettings(do_sample=True, top_k=5, top_p=0.5))
    asked, _ = reader.forwarded(CHAT, {"model": "tiny", "messages": HELLO, "top_p": 1, "top_k": 0})
    config = json.loads(asked["generation_config"])
    assert config["do_sample"] and config["top_k"] == 0 and config.get("top_p", 1) == 1


def test_a_temperature_draws_and_zero_does_not(talker):
    reader = RequestReader(talker, "tiny", AnswerSettings(max_new_tokens=8, temperature=0.9))

    def config(**body: Any) -> dict[str, Any]:
        asked, _ = reader.forwarded(CHAT, {"model": "tiny", "messages": HELLO, **body})
        return json.loads(asked["generation_config"])

    assert config()["do_sample"] and config()["temperature"] == 0.9 and config()["max_new_tokens"] == 8
    assert config(top_p=0.5)["top_p"] == 0.5
    greedy = config(temperature=0, top_p=1, max_completion_tokens=3)
    assert not greedy["do_sample"] and greedy["max_new_tokens"] == 3 and "temperature" not in greedy
    assert config(max_tokens=10_000)["max_new_tokens"] < 128, "no more than there are positions"
    assert config()["eos_token_id"] == talker.stops


def test_the_seed_of_the_server_holds_for_all_its_draws(talker):
    def drawn() -> list[str]:
        site = Site(talker)
        return [site.post(COMPLETIONS, temperature=1.5).json()["choices"][0]["text"] for _ in range(2)]

    first = drawn()
    assert first == drawn() and first[0] != first[1], "asked twice it draws twice"


def test_a_full_answer_says_that_it_was_cut(site):
    choice = site.post(messages=HELLO, max_tokens=1).json()["choices"][0]
    assert choice["finish_reason"] == "length"


# -- answers -----------------------------------------------------------------------------------------------------------


def test_it_answers_in_the_arithmetic_of_its_run(folder, monkeypatch):
    seen, talker = [], load(folder, precision=torch.bfloat16)
    real = talker.model.generate

    def generate(**words):
        seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))
        return real(**words)

    monkeypatch.setattr(talker.model, "generate", generate)
    assert Site(talker).post().status_code == 200 and seen == [(True, False)]


def test_a_stop_ends_an_answer_and_is_its_end(site):
    whole = site.post(COMPLETIONS, max_tokens=12).json()["choices"][0]["text"]
    cut = site.post(COMPLETIONS, max_tokens=12, stop=whole[1:3]).json()["choices"][0]
    assert len(cut["text"]) < len(whole) and whole[1:3] in cut["text"] and cut["finish_reason"] == "stop"


def test_without_a_template_it_goes_on_with_what_was_said(talker):
    talker.tokenizer.chat_template = None
    site = Site(talker)
    said = site.post(messages=[{"role": "user", "content": "the"}, {"role": "user", "content": "list"}], max_tokens=6)
    gone_on = site.post(COMPLETIONS, prompt="the\nlist", max_tokens=6)
    assert said.json()["choices"][0]["message"]["content"] == gone_on.json()["choices"][0]["text"]


def test_a_template_that_does_not_take_it(talker):
    talker.tokenizer.chat_template = "{{ raise_exception('users alone may speak') }}"
    answer = Site(talker).post()
    assert answer.status_code == 400 and "users alone may speak" in answer.json()["error"]["message"]


def failing(talker: Talker, monkeypatch, error: BaseException) -> Site:
    def generate(**_):
        raise error

    monkeypatch.setattr(talker.model, "generate", generate)
    return Site(talker)


@pytest.mark.parametrize("text", [None, CPU_TEXT], ids=["cuda", "cpu"])
def test_an_answer_that_does_not_fit_in_memory(talker, monkeypatch, text):
    site = failing(talker, monkeypatch, oom(text) if text else oom())
    answer = site.post()
    assert answer.status_code == 503 and answer.json()["error"]["type"] == "server_error"
    assert "does not fit in memory; shorten the prompt" in answer.json()["error"]["message"]
    assert '"message": "the answer does not fit in memory' in site.post(stream=True).text


def test_a_fault_is_an_error_of_openai_too(talker, monkeypatch):
    site = failing(talker, monkeypatch, ValueError('a "kernel"\nis gone'))
    answer = site.post()
    assert answer.status_code == 500 and answer.json()["error"]["message"] == FAILED
    events = site.post(stream=True).text.split("\n\n")
    assert json.loads(events[-2].removeprefix("data: "))["error"]["message"] == 'a "kernel"\nis gone'
    assert "[DONE]" not in "".join(events), "it is not done"


def test_a_stream_ends_with_the_mark_that_clients_wait_for(site):
    for path in (CHAT, COMPLETIONS):
        assert site.post(path, stream=True, max_tokens=3).text.endswith("data: [DONE]\n\n")


def test_a_server_that_ends_breaks_off_its_answers(site):
    site.ends.set()
    answer = site.post()
    assert answer.status_code == 503 and answer.json()["error"]["message"] == "the server is shutting down"


def test_an_answer_ends_when_its_client_is_gone(site):
    """Which waits for the whole of it: a client whose time is up would ask again, behind its own first question."""
    body = json.dumps({"model": "tiny", "messages": HELLO}).encode()
    comes = [{"type": "http.disconnect"}, {"type": "http.request", "body": body}]
    scope = {"type": "http", "method": "POST", "path": CHAT, "query_string": b"", "headers": [(b"host", HOST.encode())]}
    sent = []

    async def receive():
        return comes.pop() if len(comes) > 1 else comes[0]

    async def send(message):
        sent.append(message)

    asyncio.run(site.app(scope, receive, send))
    assert sent[0]["status"] == 503 and b"the client has disconnected" in sent[1]["body"]


def test_the_server_behind_hears_that_the_client_is_gone():
    async def read() -> list[str]:
        async def receive():
            return {"type": "http.disconnect"}

        again = _replay(b"{}", receive)
        return [(await again())["type"] for _ in range(3)]

    assert asyncio.run(read()) == ["http.request", "http.disconnect", "http.disconnect"]
