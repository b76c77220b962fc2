"""``scu-trainer serve`` as programs have it: a process of its own, asked by OpenAI's own client over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import openai
import pytest

from scu_trainer.cli.main import main
from tests import processes, tiny
from tests.hub.runs import documents, flags

KEY = "a-key-of-this-test-alone"
PROMPTS = ("What is a list?", "1: what does the duck say?", "values")
MOST_TOKENS = 12


@dataclass
class Server:
    """``said``: where its output goes. ``clients``: closed in the end."""

    process: subprocess.Popen | processes.Started
    said: Path
    words: list[str]
    run: Path
    key: str
    clients: list[openai.OpenAI] = field(default_factory=list)

    @property
    def output(self) -> str:
        return self.said.read_text()

    @property
    def address(self) -> str:
        return next(line for line in self.output.splitlines() if "http://" in line).split(": ")[1].split()[0]

    @property
    def name(self) -> str:
        return self.output.partition(": http")[0].splitlines()[-1]

    def client(self, key: str = "") -> openai.OpenAI:
        key = key or self.key or "none"
        self.clients.append(openai.OpenAI(base_url=self.address, api_key=key, max_retries=0, timeout=60))
        return self.clients[-1]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **more}


def start(run: Path, said: Path, *words: object, key: str = "", from_nothing: bool = False) -> Server:
    """``from_nothing``: as a user does; else a fork of a process that has imported everything."""
    given = ["-m", "scu_trainer.cli.main", "serve", *map(str, [run, "--port", "0", *words])]
    variables = environment(SCU_TRAINER_API_KEY=key)
    if not from_nothing:
        said.touch()  # a fork opens it itself, maybe after somebody looks
        return Server(processes.Started(given, said, variables), said, given, run, key)
    with said.open("w") as file:
        process = subprocess.Popen([sys.executable, *given], stdout=file, stderr=file, env=variables)
    return Server(process, said, given, run, key)


def ready(server: Server) -> Server:
    end_s = time.monotonic() + 120
    while "Ctrl-C ends it" not in server.output:
        assert server.process.poll() is None and time.monotonic() < end_s, server.output
        time.sleep(0.1)
    return server


def end(server: Server) -> None:
    if server.process.poll() is None:
        server.process.kill()
        server.process.wait(timeout=60)
    for client in server.clients:
        client.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A small Llama with a template and many positions, and a LoRA run on the embedded base, which has no template."""
    folder = tmp_path_factory.mktemp("serve")
    config = tiny.saved_llama(folder / "llama") / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 8192}))
    documents(folder / "documents.jsonl")
    words = flags(folder, "mine", embedded_base_steps=2, lora_r=4, tuning="lora")
    place = words.index("--model_name_or_path")
    assert main(["train", *words[:place], *words[place + 2 :]]) == 0
    return folder


@pytest.fixture(scope="module")
def servers(folder) -> Iterator[dict[str, Server]]:
    """Both begin at the same time."""
    begun = {
        "llama": start(folder / "llama", folder / "llama.out", "--dtype", "float32"),
        "mine": start(folder / "mine", folder / "mine.out", key=KEY),
    }
    try:
        yield {name: ready(server) for name, server in begun.items()}
    finally:
        for server in begun.values():
            end(server)


@pytest.fixture(scope="module")
def ending(folder) -> Iterator[dict[signal.Signals, Server]]:
    """One for each signal that ends it, both at the same time; for Ctrl-C, of which Python has a handler of its own,
    from nothing."""
    begun = {
        sent: start(folder / "mine", folder / f"{sent.name}.out", from_nothing=sent == signal.SIGINT)
        for sent in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield {sent: ready(server) for sent, server in begun.items()}
    finally:
        for server in begun.values():
            end(server)


@pytest.fixture(params=["llama", "mine"])
def server(request, servers) -> Server:
    return servers[request.param]


def generated(server: Server, folder: Path) -> list[dict]:
    """What ``scu-trainer generate`` says to the prompts."""
    asked, answers = folder / "asked.txt", folder / f"{server.name}.jsonl"
    asked.write_text("\n".join(PROMPTS))
    words = ["--max_new_tokens", MOST_TOKENS, "--do_sample", "false", "--batch_size", "1", "--dtype", "float32"]
    assert main(["generate", *map(str, [server.run, "--prompts", asked, "--output", answers, *words])]) == 0
    return [json.loads(line) for line in answers.read_text().splitlines()]


def message(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def test_the_greedy_answer_is_that_of_generate_streamed_or_not(server, folder):
    client, asked = server.client(), {"model": server.name, "temperature": 0, "max_tokens": MOST_TOKENS}
    expected = generated(server, folder)
    whole = [client.chat.completions.create(messages=message(prompt), **asked) for prompt in PROMPTS]
    assert [one.choices[0].message.content for one in whole] == [row["answer"] for row in expected]
    assert any(row["answer"] for row in expected)
    assert all(one.model == server.name and one.usage.completion_tokens <= MOST_TOKENS for one in whole)
    for prompt, row in zip(PROMPTS, expected, strict=True):
        begun_s, first_s, pieces = time.monotonic(), None, []
        for chunk in client.chat.completions.create(messages=message(prompt), stream=True, **asked):
            first_s = first_s or time.monotonic() - begun_s
            pieces.append(chunk.choices[0].delta.content or "")
        assert "".join(pieces) == row["answer"] and first_s is not None
        assert chunk.choices[0].finish_reason in ("stop", "length") and chunk.usage.total_tokens > 0


def test_completions_go_on_with_a_text(server):
    client, asked = server.client(), {"model": server.name, "prompt": "the list", "temperature": 0, "max_tokens": 6}
    text = client.completions.create(**asked).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(stream=True, **asked)]
    assert text and "".join(pieces) == text


def test_many_that_ask_at_once_get_the_answers_that_each_gets_alone(servers):
    client, asked = servers["llama"].client(), {"model": "llama", "temperature": 0, "max_tokens": MOST_TOKENS}

    def answer(prompt: str) -> str:
        return client.chat.completions.create(messages=message(prompt), **asked).choices[0].message.content

    alone = [answer(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(answer, PROMPTS)) == alone


def test_a_seed_draws_the_same_again_and_another_one_something_else(servers):
    client, asked = servers["llama"].client(), {"model": "llama", "prompt": "the", "temperature": 1.5, "max_tokens": 12}
    one, again, other = (client.completions.create(seed=seed, **asked).choices[0].text for seed in (5, 5, 6))
    streamed = [chunk.choices[0].text for chunk in client.completions.create(seed=5, stream=True, **asked)]
    assert one == again == "".join(streamed) != other


def test_only_its_own_name_is_listed_and_answered(server):
    client = server.client()
    listed = list(client.models.list())
    assert [(model.id, model.owned_by) for model in listed] == [(server.name, "scu-trainer")]
    assert listed == [client.models.retrieve(server.name)]
    assert server.name == server.run.name
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt2", messages=message("hello"))
    assert refused.value.body == {
        "message": f"there is no model 'gpt2' here, only {server.name}", "type": "invalid_request_error",
        "param": "model", "code": "model_not_found",
    }  # fmt: skip
    assert "Loading" not in server.output, "transformers says so where it loads a model by itself"


def test_a_wrong_key_and_none(servers):
    server = servers["mine"]
    with pytest.raises(openai.AuthenticationError) as refused:
        server.client("another-key-of-this-test").models.list()
    assert refused.value.body["code"] == "invalid_api_key"
    assert httpx.get(f"{server.address}/models").status_code == 401
    assert KEY not in server.output and KEY not in " ".join(server.words)


def test_a_foreign_host_a_foreign_page_and_other_routes(servers):
    address = servers["llama"].address
    assert httpx.get(f"{address}/models", headers={"Host": "evil.example"}).status_code == 421
    assert httpx.get(f"{address}/models", headers={"Origin": "http://evil.example"}).status_code == 403
    origin = address.removesuffix("/v1")
    assert httpx.post(f"{origin}/load_model", json={"model": "gpt2"}).status_code == 404
    assert httpx.post(f"{origin}/reset").status_code == 404
    assert httpx.get(f"{origin}/openapi.json").status_code == 404
    assert httpx.get(f"{origin}/health").json() == {"status": "ok"}


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_within_seconds_while_it_answers(ending, sent):
    """With the model of 4,096 positions: the other's longest answer may be over before the signal arrives."""
    server = ending[sent]
    asked = {"model": server.name, "messages": message("What is a list?"), "max_tokens": 4000, "temperature": 0}
    with server.client().chat.completions.create(stream=True, **asked) as stream:
        next(stream)
        server.process.send_signal(sent)
        with pytest.raises(openai.APIError, match="the server is shutting down"):
            list(stream)
    assert server.process.wait(timeout=60) == (-signal.SIGTERM if sent == signal.SIGTERM else 130)


def test_the_client_of_the_page_prints_the_answer(servers, capsys):
    page = Path(__file__).parents[2] / "docs" / "serve.md"
    code = re.search(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[1]
    server = servers["llama"]
    for shown, own in (("http://127.0.0.1:8000/v1", server.address), ('"mine"', repr(server.name))):
        assert shown in code
        code = code.replace(shown, own)
    code = code.replace("stream=True", f"stream=True, max_tokens={MOST_TOKENS}")
    names = {"__name__": "yours"}
    exec(compile(code, str(page), "exec"), names)
    server.clients.append(names["client"])
    assert capsys.readouterr().out.strip()
