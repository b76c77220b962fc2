"""Record the use of a finished run: chat, generate, export and serve, for two runs that are trained here.

python benchmarks/headline/after_training.py [--output docs/after_training.md]

The first is the first run of the README (LoRA on the embedded base). The second is a Llama of two layers with random
weights, trained for 200 steps on conversations about six animals. Chat runs in a pseudo-terminal, as for a user.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import re
import select
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scu_trainer.data import default_cache_dir, embedded_tokenizer
from scu_trainer.hardware.probe import free_port

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "120", "PYTHONPATH": str(ROOT)}
PROGRAM = [sys.executable, "-m", "scu_trainer.cli.main"]
LIMIT_S = 300
SOUNDS = {"duck": "quack", "cow": "moo", "cat": "meow", "dog": "woof", "sheep": "baa", "hen": "cluck"}
QUESTIONS = ("What does the {} say?", "Which sound does a {} make?", "Tell me what the {} says.")
EMBEDDED, LLAMA = "runs/scu_lora", "runs/animals"
ABOUT = """\
This page shows every command that you can type after training, with its output: `chat`, `generate`, `export` to each
format, and `serve`. [talk.md](talk.md), [take_along.md](take_along.md) and [serve.md](serve.md) explain them."""
MADE_BY = {
    EMBEDDED: "The first run is that of `recipes/scu_lora.yaml`, with 60 steps: a small base with a LoRA adapter.",
    LLAMA: "The second run is a small Llama, with all weights trained on questions about animals.",
}
ASKED = {EMBEDDED: "def sorted(iterable):", LLAMA: "What does the cow say?"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "after_training.md")
    typed = parser.parse_args()
    written = f"`python benchmarks/headline/after_training.py` wrote it on {time.strftime('%Y-%m-%d')}."
    parts = ["# After training: a recorded session", f"{ABOUT} {written}"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        _make_runs(Path(folder))
        for run in (EMBEDDED, LLAMA):
            print(f"recording {run}", flush=True)
            parts += [f"## {run}", MADE_BY[run]]
            parts += [_block(text.replace(folder, ".")) for text in _recorded(run)]
    typed.output.write_text("\n\n".join(parts) + "\n")
    print(typed.output.read_text())


def _block(text: str) -> str:
    return f"```\n{text.strip()}\n```"


# -- the runs ----------------------------------------------------------------------------------------------------------


def _make_runs(folder: Path) -> None:
    _train("--config", ROOT / "recipes" / "scu_lora.yaml", "--output_dir", EMBEDDED, "--max_steps", 60)
    _llama(folder / "llama")
    _conversations(folder / "animals.jsonl")
    _train(
        "--model_name_or_path", "llama", "--dataset", "animals.jsonl", "--tuning", "full", "--output_dir", LLAMA,
        "--max_steps", 200, "--learning_rate", 2e-3, "--per_device_train_batch_size", 16, "--block_size", 96,
    )  # fmt: skip


def _train(*words: object) -> None:
    print(f"training: {' '.join(map(str, words))}", flush=True)
    subprocess.run(
        [*PROGRAM, "train", *map(str, words), "--report_to", "none"], env=ENVIRONMENT, check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip


def _llama(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = embedded_tokenizer(default_cache_dir(None))
    special = {word: getattr(tokenizer, word) for word in ("pad_token_id", "bos_token_id", "eos_token_id")}
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **sizes, **special)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _conversations(file: Path) -> None:
    rows = []
    for question in QUESTIONS:
        for animal, sound in SOUNDS.items():
            said = {"role": "user", "content": question.format(animal)}
            rows += [{"messages": [said, {"role": "assistant", "content": f"The {animal} says {sound}."}]}] * 20
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


# -- the recordings ----------------------------------------------------------------------------------------------------


def _recorded(run: str) -> list[str]:
    asked = ASKED[run]
    Path("questions.jsonl").write_text(json.dumps({"prompt": asked}) + "\n")
    found = [_chat(f"{run} --against base --max_new_tokens 24", asked)]
    found.append(_said(f"generate {run} --prompts questions.jsonl --output {run}-answers.jsonl --max_new_tokens 24"))
    found.append(f"$ cat {run}-answers.jsonl\n" + Path(f"{run}-answers.jsonl").read_text())
    found += [_said(f"export {run} --to {format}") for format in ("safetensors", "gguf", "ollama", "onnx")]
    found.append(f"$ cat {run}-ollama/Modelfile\n" + Path(f"{run}-ollama/Modelfile").read_text())
    found.append(_served(run, asked))
    return found


def _said(words: str) -> str:
    done = subprocess.run(
        [*PROGRAM, *shlex.split(words)], env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    if done.returncode:
        raise SystemExit(f"scu-trainer {words}: {done.stderr[-2000:]}")
    return f"$ scu-trainer {words}\n{done.stdout}"


def _chat(words: str, *lines: str) -> str:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*PROGRAM, "chat", *words.split()], stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL, env=ENVIRONMENT
    )
    os.close(theirs)
    seen, prompts = b"", 0
    try:
        for line in [*lines, "/exit"]:
            prompts += 1
            while len(re.findall(rb"(?m)^(?:\x1b\S*)*> ", seen.replace(b"\r", b""))) < prompts:
                seen += _read(ours)
            os.write(ours, line.encode() + b"\n")
        while process.poll() is None and (more := _read(ours)):
            seen += more
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode(errors="replace")).replace("\r", "")
    return f"$ scu-trainer chat {words}\n{text}"


def _read(terminal: int) -> bytes:
    if not select.select([terminal], [], [], LIMIT_S)[0]:
        raise SystemExit("the terminal has been silent for too long")
    try:
        return os.read(terminal, 4096)
    except OSError:  # the program in the terminal has ended
        return b""


CLIENT = """\
from openai import OpenAI
client = OpenAI(base_url="{address}/v1", api_key="none")
messages = [{{"role": "user", "content": {asked!r}}}]
stream = client.chat.completions.create(model="{name}", messages=messages, max_tokens=24, temperature=0, stream=True)
"""


def _served(run: str, asked: str) -> str:
    from openai import OpenAI

    port = free_port()
    words, name = f"serve {run} --port {port}", Path(run).name
    process = subprocess.Popen(
        [*PROGRAM, *words.split()], env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=LIMIT_S)
        _wait_for(port, process)
        client.models.list()  # makes the client import its modules
        messages = [{"role": "user", "content": asked}]
        begin_s, first_s, text = time.perf_counter(), 0.0, ""
        for part in client.chat.completions.create(
            model=name, messages=messages, max_tokens=24, temperature=0, stream=True
        ):
            new = part.choices[0].delta.content or "" if part.choices else ""
            first_s = first_s or (time.perf_counter() - begin_s if new else 0.0)
            text += new
    finally:
        process.terminate()
        printed = process.communicate(timeout=60)[0]
    asks = CLIENT.format(address=f"http://127.0.0.1:{port}", asked=asked, name=name)
    return f"$ scu-trainer {words}\n{printed}\n{asks.strip()}\n\n{text}\n[the first after {first_s:.2f} s]"


def _wait_for(port: int, process: subprocess.Popen) -> None:
    end_s = time.monotonic() + LIMIT_S
    while time.monotonic() < end_s and process.poll() is None:
        with socket.socket() as one:
            if one.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.5)
    raise SystemExit("scu-trainer serve did not begin")


if __name__ == "__main__":
    main()
