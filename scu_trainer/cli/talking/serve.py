"""``scu-trainer serve``: serves a model over OpenAI's HTTP interface, with the server of transformers or with vLLM."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Optional

from scu_trainer.cli.main import guarded, stdout_to_stderr
from scu_trainer.cli.origin import is_merged_from
from scu_trainer.cli.parsing import Parser
from scu_trainer.cli.publishing.merge import MergeOptions, default_output, merge
from scu_trainer.cli.subjects import Subject
from scu_trainer.cli.talking.options import add_options, answer_settings, subject_from_options, talker
from scu_trainer.errors import RequirementError, SettingsError, StorageError, require_packages
from scu_trainer.hardware.probe import has_cuda
from scu_trainer.listening import HOST, allowed_hosts, check_address, is_loopback, listening_socket, url_host
from scu_trainer.models.loading.names import is_adapter
from scu_trainer.secrets import remember

if TYPE_CHECKING:
    from scu_trainer.serve.questions import RequestReader

PORT, MAX_NEW_TOKENS = 8000, 512
KEY_VARIABLE, LEAST_KEY_LENGTH = "SCU_TRAINER_API_KEY", 16
VLLM_KEY_VARIABLE = "VLLM_API_KEY"
ENGINES = ("auto", "transformers", "vllm")
PACKAGES = ("fastapi", "uvicorn", "openai", "pydantic")
NEW_KEY = "openssl rand -hex 24"
DESCRIPTION = f"""\
Answers as OpenAI's HTTP interface does (/v1/chat/completions, /v1/completions, /v1/models), for this model only. RUN
is the folder of a run, of one of its checkpoints, of an adapter or a model, or a Hub id. The server is that of
transformers, or vLLM. Put the key that clients have to send into {KEY_VARIABLE} or a file; it is required
if other machines can reach --host. It cannot be an argument, because every user of a machine can read those.

The flags of an answer apply if a request does not set them: temperature 0 in a request is greedy."""


def _parser() -> Parser:
    parser = Parser(
        prog="scu-trainer serve", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    add = parser.add_argument
    add("--host", default=HOST, help=f"address to listen on; default: {HOST}, which only this machine can reach")
    add("--port", type=int, default=PORT, help=f"default: {PORT}; 0 picks a free one")
    add(
        "--api_key_file",
        type=Path,
        metavar="FILE",
        help=f"file that holds the key; default: the key in {KEY_VARIABLE}",
    )
    add("--api_key", nargs="?", const="", help=argparse.SUPPRESS)
    add("--served_model_name", metavar="NAME", help="name of the model in requests; "
    "default: the name of the run")  # fmt: skip
    add("--engine", choices=ENGINES, default="auto", help="auto: vllm if it is installed and there is a GPU")
    add_options(parser, MAX_NEW_TOKENS)
    return parser


@guarded
def main(argv: list[str]) -> int:
    options = _parser().parse_args(argv)
    check_address(options.host, options.port)
    engine, key = _chosen_engine(options), _key(options)
    if engine == "vllm":
        _check_vllm(options, key)
    else:
        require_packages("the server", "serve", PACKAGES)
    subject = subject_from_options(options.run, options)
    name = options.served_model_name or default_name(subject)
    with listening_socket(options.host, options.port) as listening:
        options.port = listening.getsockname()[1]
        if engine == "transformers":
            return _serve_with_transformers(subject, name, options, listening, key)
    return _serve_with_vllm(subject, name, options, key)


def default_name(subject: Subject) -> str:
    """Return the name of the folder; for a checkpoint, with the name of its run."""
    return subject.name if subject.is_of_hub else default_output(subject).name.removesuffix("-merged")


# -- the key -----------------------------------------------------------------------------------------------------------


def _key(options: argparse.Namespace) -> Optional[str]:
    """Return the key, or None if none is needed. Raises SettingsError if a key is missing or could be guessed."""
    if options.api_key is not None:
        raise SettingsError(f"--api_key would show the key to every user of this machine; put it into {KEY_VARIABLE}, "
                            "or into a file for --api_key_file")  # fmt: skip
    key, place = _stored_key(options.api_key_file)
    if key is None:
        if not is_loopback(options.host):
            raise SettingsError(f"--host {options.host} can be reached from other machines, so a key is needed: "
                                f"export {KEY_VARIABLE}=$({NEW_KEY}), or give --api_key_file")  # fmt: skip
        return None
    remember(key)
    if len(key) < LEAST_KEY_LENGTH or not key.isascii() or not key.isprintable() or " " in key:
        raise SettingsError(f"the key in {place} must have {LEAST_KEY_LENGTH} characters or more, of ASCII and without "
                            f"spaces; {NEW_KEY} makes one")  # fmt: skip
    return key


def _stored_key(file: Optional[Path]) -> tuple[Optional[str], str]:
    """Return the key, and where it was found. An empty variable counts as no key; an empty file is an error."""
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").strip() or None, KEY_VARIABLE
    try:
        return file.expanduser().read_text(encoding="utf-8").strip(), str(file)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api_key_file {file} cannot be read: {error}") from error


# -- transformers ------------------------------------------------------------------------------------------------------


def _serve_with_transformers(
    subject: Subject, name: str, options: argparse.Namespace, listening: socket.socket, key: Optional[str]
) -> int:
    with stdout_to_stderr():
        from scu_trainer.serve.guard import RequestGuard
        from scu_trainer.serve.questions import RequestReader
        from scu_trainer.serve.running import run
        from scu_trainer.serve.transformers_server import application

        settings, ends = answer_settings(options), Event()
        reader = RequestReader(talker(subject), name, settings)
        hosts = allowed_hosts(options.host, options.port) if is_loopback(options.host) else None
        app = RequestGuard(application(reader, ends), hosts, key)
    print("\n".join(_opening(reader, options, key)), flush=True)
    run(app, listening, ends)
    return 0


def _opening(reader: RequestReader, options: argparse.Namespace, key: Optional[str]) -> list[str]:
    lines = [
        f"{reader.name}: {_address(options)} (the server of transformers)",
        reader.settings.in_words(reader.talker),
    ]
    return [*lines, *reader.talker.notes(reader.name), _access_note(key)]


def _address(options: argparse.Namespace) -> str:
    return f"http://{url_host(options.host)}:{options.port}/v1"


def _access_note(key: Optional[str]) -> str:
    clients = "every program on this machine may use it" if key is None else "anyone with the key may use it"
    return f"{clients}; Ctrl-C ends it"


# -- vLLM --------------------------------------------------------------------------------------------------------------


def _chosen_engine(options: argparse.Namespace) -> str:
    if options.engine != "auto":
        return options.engine
    return "vllm" if not options.use_cpu and _has_vllm() and has_cuda() else "transformers"


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _check_vllm(options: argparse.Namespace, key: Optional[str]) -> None:
    if not _has_vllm():
        raise RequirementError("vllm is not installed; pip install vllm, or --engine transformers")
    if options.use_cpu:
        raise SettingsError("--use_cpu is for --engine transformers")
    if key is None:
        raise SettingsError(f"vLLM does not check the host name, so web pages in a browser on this machine "
        f"could use it; a key is needed: export {KEY_VARIABLE}=$({NEW_KEY}), or --engine "
                            "transformers")  # fmt: skip


def _model_for_vllm(subject: Subject, options: argparse.Namespace) -> str:
    """Return the path that vLLM loads. An adapter is merged into a folder next to it, unless that was done before."""
    source = Path(subject.source)
    if not is_adapter(source):
        return subject.source
    output = default_output(subject)
    if output.exists():
        if not is_merged_from(output, source):
            raise StorageError(f"{output} exists, but was not merged from this adapter; remove it, or serve it")
        print(f"served from {output}, which was merged from this adapter")
        return str(output)
    print(f"vLLM gets the adapter merged into its base: {output}", flush=True)
    merge(subject, output, MergeOptions(trust_remote_code=options.trust_remote_code, allow_pickle=options.allow_pickle))
    return str(output)


def _serve_with_vllm(subject: Subject, name: str, options: argparse.Namespace, key: str) -> int:
    model, answers = _model_for_vllm(subject, options), asdict(answer_settings(options))
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(subject.mixed_precision or "", subject.model.dtype or "auto")
    words = vllm_command(
        model, name, options.host, options.port, dtype, answers, options.trust_remote_code, options.allow_pickle
    )
    print(f"{name}: {_address(options)} (vLLM); {_access_note(key)}", flush=True)
    os.environ[VLLM_KEY_VARIABLE] = key
    os.execvp(words[0], words)


def vllm_command(
    model: str,
    name: str,
    host: str,
    port: int,
    dtype: str,
    answers: Mapping[str, Any],
    trust_remote_code: bool,
    allow_pickle: bool,
) -> list[str]:
    """Return the command that serves a model with vLLM. ``answers``: the fields of AnswerSettings; None: as in the
    model's generation config. The key is not among the arguments, which other users can see; it is passed in the
    environment variable VLLM_KEY_VARIABLE."""
    words = ["vllm", "serve", model, "--served-model-name", name, "--host", host, "--port", str(port)]
    words += ["--dtype", dtype, "--seed", str(answers["seed"]), "--allowed-origins", "[]"]
    words += ["--override-generation-config", json.dumps(_override(answers))]
    if not allow_pickle:
        words += ["--load-format", "safetensors"]
    return [*words, "--trust-remote-code"] if trust_remote_code else words


def _override(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes to the generation config, without max_new_tokens, to which vLLM would limit every request."""
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    override = {name: answers[name] for name in names if answers[name] is not None}
    return {**override, "temperature": 0.0} if answers["do_sample"] is False else override
