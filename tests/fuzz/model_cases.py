"""Folders that pass for a model: configurations with impossible sizes, weights and tokenizers that are torn."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

from tests.fuzz.site import Site

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "vocab_size", "max_position_embeddings", "head_dim", "rms_norm_eps", "rope_theta", "bos_token_id",
         "eos_token_id",
         "pad_token_id", "hidden_act", "dtype", "model_type", "architectures", "tie_word_embeddings",
         "attention_dropout",
         "initializer_range", "use_cache", "quantization_config", "rope_scaling", "rope_parameters", "attention_bias",
         "auto_map", "transformers_version", "is_decoder", "layer_types")  # fmt: skip
VALUES: tuple[Any, ...] = (0, -1, -4, 1, 3, 10**9, 10**12, 10**30, 2**31, 1.5, float("nan"), float("inf"), "", "x",
        "4", None,
                           [], {}, [0], True, False, "float99", "int8", "complex64", "torch.float32", "float16", [None],
                           {"rope_type": "x"}, {"type": "linear", "factor": 0}, {"quant_method": "x"}, "llama",
                           "nobody",
                           "../../x", "bert", "t5", "resnet", {"AutoConfig": "x.Y"})  # fmt: skip
TEXTS = (b"", b"{", b"[]", b"null", b"3", b'"x"', b"{}", b"\xff\xfe", b"\0", b"[" * 5000, b'{"a":' * 5000,
        b'{"model_type": "llama"}',
         b'{"model_type": 3}', b'{"model_type": null}', b'{"architectures": ["X"]}', b"NaN", b'{"a": 1} x')  # fmt: skip
FROM_SCRATCH = ("gpt2", "bert", "t5", "granitemoehybrid", "mamba", "vit", "opt", "whisper", "clip", "resnet", "qwen3",
        "gemma3",
                "falcon", "timm_wrapper", "cadence", "trident")  # fmt: skip


def model_config(chance: random.Random, folder: Path, site: Site) -> list[str]:
    model = _copy(folder, site.model)
    make = chance.choice(
        [_value, _value, _value, _value, _text, _weights, _tokenizer, _file_kind, _adapter, _scratch, _huge]
    )
    make(chance, model)
    changes = {}
    if chance.random() < 0.3:
        changes["tuning"] = chance.choice(["full", "lora", "qlora"])
    if chance.random() < 0.1:
        changes["dtype"] = chance.choice(["float16", "bfloat16", "float32"])
    if chance.random() < 0.1:
        changes["device_map"] = chance.choice(["auto", "sequential"])
    return site.train(model_name_or_path="./model", **changes)


def _copy(folder: Path, source: Path) -> Path:
    model = folder / "model"
    shutil.copytree(source, model)
    return model


def _change(model: Path, name: str = "config.json", **changes: Any) -> None:
    content = json.loads((model / name).read_text())
    (model / name).write_text(json.dumps({**content, **changes}))


def _value(chance: random.Random, model: Path) -> None:
    for name in chance.sample(SIZES, chance.choice((1, 1, 2))):
        _change(model, **{name: chance.choice(VALUES)})
    if chance.random() < 0.3:
        (model / "model.safetensors").unlink()


def _huge(chance: random.Random, model: Path) -> None:
    """Weights that no machine holds, with and without files of them."""
    name = chance.choice(["hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size", "num_attention_heads"])
    _change(model, **{name: chance.choice([10**7, 10**8, 10**9, 2**40])})
    if chance.random() < 0.5:
        (model / "model.safetensors").unlink()


def _text(chance: random.Random, model: Path) -> None:
    name = chance.choice(
        ["config.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    )
    (model / name).write_bytes(chance.choice(TEXTS))


def _weights(chance: random.Random, model: Path) -> None:
    path = model / "model.safetensors"
    content = path.read_bytes()
    kind = chance.randrange(8)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(content[: chance.randrange(len(content))])
    elif kind == 2:
        path.write_bytes(
            chance.choice([b"", b"\0" * 8, b"\xff" * 8, b"\0" * 100, (2**40).to_bytes(8, "little") + b"{}"])
        )
    elif kind == 3:
        header = json.dumps({"x": {"dtype": "F99", "shape": [-1], "data_offsets": [0, 10**18]}}).encode()
        path.write_bytes(len(header).to_bytes(8, "little") + header)
    elif kind == 4:
        path.unlink()
        index = {"metadata": {}, "weight_map": {"lm_head.weight": chance.choice(["no.safetensors", "../x", 3])}}
        (model / "model.safetensors.index.json").write_text(json.dumps(chance.choice([index, {}, [], 3])))
    elif kind == 5:
        path.unlink()
        (model / "pytorch_model.bin").write_bytes(chance.choice([b"", b"PK\3\4", content, b"\x80\x04K\x01."]))
    elif kind == 6:
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(content + b"more")


def _tokenizer(chance: random.Random, model: Path) -> None:
    path = model / chance.choice(["tokenizer.json", "tokenizer_config.json"])
    kind = chance.randrange(5)
    if kind == 0:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (model / name).unlink()
    elif kind == 1:
        path.unlink()
    elif kind == 2:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) // 2])
    elif kind == 3:
        _change(
            model,
            "tokenizer_config.json",
            **{
                chance.choice(
                    [
                        "tokenizer_class",
                        "eos_token",
                        "model_max_length",
                        "added_tokens_decoder",
                        "chat_template",
                        "pad_token",
                        "extra_special_tokens",
                        "auto_map",
                    ]
                ): chance.choice([0, "", None, [], {}, "X", "Nobody", -1, 10**30, {"a": 1}, "{{ x"])
            },
        )
    else:
        content = json.loads((model / "tokenizer.json").read_text())
        content[chance.choice(["model", "added_tokens", "version", "pre_tokenizer", "normalizer"])] = chance.choice(
            [None, {}, [], 3, "x", {"type": "Nobody"}]
        )
        (model / "tokenizer.json").write_text(json.dumps(content))


def _file_kind(chance: random.Random, model: Path) -> None:
    kind = chance.randrange(4)
    if kind == 0:
        (model / "config.json").unlink()
    elif kind == 1:
        (model / "config.json").unlink()
        (model / "config.json").mkdir()
    elif kind == 2:
        (model / "config.json").unlink()
        (model / "config.json").symlink_to("config.json")
    else:
        shutil.rmtree(model)
        model.write_text("a file")


def _adapter(chance: random.Random, model: Path) -> None:
    source = str(model.parent / "base")
    shutil.move(str(model), source)
    model.mkdir()
    good = {
        "peft_type": "LORA",
        "base_model_name_or_path": source,
        "r": 2,
        "lora_alpha": 4,
        "task_type": "CAUSAL_LM",
        "target_modules": ["q_proj"],
    }
    name = chance.choice(list(good))
    good[name] = chance.choice([None, 0, -1, 10**9, "", "x", "./nowhere", [], {}, True, ["nobody"], 1.5, "\0"])
    (model / "adapter_config.json").write_bytes(chance.choice([json.dumps(good).encode()] * 3 + list(TEXTS)))
    if chance.random() < 0.5:
        (model / "adapter_model.safetensors").write_bytes(chance.choice([b"", b"\0" * 64, b"x" * 8]))


def _scratch(chance: random.Random, model: Path) -> None:
    """A configuration of another kind, with the weights of a Llama or none."""
    changes = {chance.choice(SIZES): chance.choice(VALUES)} if chance.random() < 0.3 else {}
    (model / "config.json").write_text(json.dumps({"model_type": chance.choice(FROM_SCRATCH), **changes}))
    (model / "model.safetensors").unlink()
