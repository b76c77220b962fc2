"""Words that no field expects, in every field of the command line; and folders of pictures and of recordings."""

from __future__ import annotations

import functools
import io
import json
import random
from pathlib import Path
from typing import Any

from tests.fuzz.settings_cases import BIG_MACHINE
from tests.fuzz.site import Site

WORDS = ("", " ", "x", "None", "null", "true", "false", "True", "1", "-1", "0.5", "nan", "[]", "{}", "[1]", "{",
        '{"a": 1}',
         '{"a": NaN}', '{"a": {"b": []}}', '"x"', "[NaN]", "a=b", "a,b", "=", ",", "/", ".", "nowhere", "nowhere.json",
         "file.json", "binary.json", "empty.json", "list.json", "/dev/null", "a b", "%s", "{0}", "\n", "ünï", "auto",
         "all",
         "no", "linear", "cosine", "adamw_torch", "lomo", "galore_adamw", "eager", "flash_attention_2", "cuda:0", "cpu",
         "-", "--", "x" * 300, "x" * 10_000, "1e400", "9" * 30, "<|x|>", "$HOME", "file.json/below",
         "~nobody")  # fmt: skip
TOO_SLOW = ("torch_compile", "torch_compile_mode", "torch_compile_backend")
"""Compiling takes a minute and needs a compiler."""


@functools.cache
def all_fields() -> list[str]:
    from transformers import TrainingArguments

    from scu_trainer.cli import fields

    names = fields.field_names(fields.settings_parser(TrainingArguments))
    return sorted(names - {*TOO_SLOW, *BIG_MACHINE, "help", "push_to_hub", "auto_find_batch_size"})


def fields(chance: random.Random, folder: Path, site: Site) -> list[str]:
    """One or two fields of any type, given a word that may mean nothing to them."""
    (folder / "file.json").write_text(chance.choice(['{"a": 1}', "{", '{"train_batch_size": "x"}', "null"]))
    (folder / "binary.json").write_bytes(b"\xff\xfe\0")
    (folder / "empty.json").touch()
    (folder / "list.json").write_text("[1, 2]")
    names = chance.sample(all_fields(), chance.choice((1, 1, 1, 2)))
    given = {name: chance.choice(WORDS) for name in names}
    if chance.random() < 0.7:
        return site.train(**given)
    (folder / "c.json").write_text(json.dumps({name: _as_value(chance, word) for name, word in given.items()}))
    return [*site.train(**dict.fromkeys(given)), "--config", "c.json"]


def _as_value(chance: random.Random, word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return chance.choice([word, [word], {"a": word}])


def pictures(chance: random.Random, folder: Path, site: Site) -> list[str]:
    place = folder / "pictures"
    for name in chance.choice([("a", "b"), ("train/a", "train/b", "val/a"), ("a",), (), ("a", "b", "c")]):
        (place / name).mkdir(parents=True)
        for number in range(chance.randint(0, 4)):
            kind = chance.choice(["png", "jpg", "gif", "webp", "tiff", "PNG", "bmp"])
            (place / name / f"{number}.{kind}").write_bytes(_picture(chance))
    place.mkdir(exist_ok=True)
    more = {"skip_bad_rows": "true"} if chance.random() < 0.5 else {}
    more |= (
        {
            chance.choice(
                ["image_size", "image_channels", "image_column_name", "dataset_split", "validation_split_percentage"]
            ): chance.choice(["8", "0", "-1", "3", "x", "1000000", "50", "val"])
        }
        if chance.random() < 0.4
        else {}
    )
    return site.train(
        task="image-classification",
        dataset="pictures",
        model_name_or_path=_image_model(chance, folder),
        block_size=None,
        **more,
    )


def _picture(chance: random.Random) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    mode = chance.choice(["RGB", "L", "RGBA", "1", "I;16", "P", "CMYK"])
    size = chance.choice([(16, 16), (1, 1), (8, 9), (1, 500)])
    Image.new(mode, size).save(out, "TIFF" if mode in ("I;16", "CMYK") else "PNG")
    content = out.getvalue()
    return chance.choice(
        [
            content,
            content,
            content,
            content[: len(content) // 2],
            b"",
            b"GIF89a",
            b"\x89PNG\r\n\x1a\n",
            chance.randbytes(90),
        ]
    )


def _image_model(chance: random.Random, folder: Path) -> str | None:
    if chance.random() < 0.5:
        return None
    from tests import tiny

    tiny.vit().save_pretrained(folder / "vit")
    path = folder / "vit" / "config.json"
    config = json.loads(path.read_text())
    name = chance.choice(
        [
            "hidden_size",
            "num_attention_heads",
            "image_size",
            "patch_size",
            "num_channels",
            "id2label",
            "num_hidden_layers",
            "model_type",
            "architectures",
            "hidden_act",
            "dtype",
            "label2id",
        ]
    )
    config[name] = chance.choice([0, -1, 3, 10**9, 10**30, None, "x", [], {}, 1.5, {"0": "a"}, {"x": 1}])
    path.write_text(chance.choice([json.dumps(config)] * 4 + ["{", "[]", ""]))
    return "./vit"


def recordings(chance: random.Random, folder: Path, site: Site) -> list[str]:
    import numpy

    place = folder / "recordings"
    place.mkdir()
    rows = []
    for number in range(chance.choice((0, 1, 4, 8))):
        arrays = {"visible": numpy.zeros((2, 8, 8, 3), "uint8"), "kinematics": numpy.zeros((8, 6), "float32")}
        arrays[chance.choice(["visible", "kinematics", "infrared", "x"])] = chance.choice(
            [
                numpy.zeros(0),
                numpy.zeros((1, 1)),
                numpy.full((8, 6), numpy.nan),
                numpy.zeros((2, 8, 8, 3), "uint8"),
                numpy.zeros((8, 6), "int8"),
                numpy.zeros((2, 9, 9, 3), "uint8"),
            ]
        )
        numpy.savez(place / f"{number}.npz", **arrays)
        if chance.random() < 0.2:
            (place / f"{number}.npz").write_bytes(chance.choice([b"", b"PK\3\4", chance.randbytes(200)]))
        rows.append({"file": f"{number}.npz", "label": number % 2, "missing": ["infrared"]})
    lines = [json.dumps(row) for row in rows]
    for _ in range(chance.randint(0, 2)):
        lines.insert(
            0,
            chance.choice(
                [
                    "{",
                    "[]",
                    "3",
                    '{"file": 3, "label": 0}',
                    '{"file": "../x", "label": 0}',
                    "[" * 5000,
                    '{"file": "0.npz", "label": 1e999}',
                    '{"file": "0.npz", "label": ' + "9" * 5000 + "}",
                    '{"file": "\\ud800"}',
                    '{"file": "0.npz", "label": -5}',
                    '{"file": "0.npz", "label": 99999999999}',
                    '{"file": "0.npz", "label": "\\ud800"}',
                    '{"file": "' + "x" * 300 + '", "label": 0}',
                    '{"file": ".", "label": 0}',
                    '{"file": "0.npz", "label": [], "missing": 3}',
                    '{"file": "0.npz", "label": 0, "missing": [[]]}',
                    '{"file": "0.npz", "label": 0, "split": 3}',
                ]
            )[:6000],
        )
    name = chance.choice(["manifest.jsonl", "manifest.jsonl", "manifest.jsonl", "manifest.csv"])
    content = "\n".join(lines).encode()
    (place / name).write_bytes(chance.choice([content] * 5 + [b"", b"\xff\xfe", b"\0", b"file,label\n0.npz,0\n,,,\n"]))
    more = {"skip_bad_rows": "true"} if chance.random() < 0.6 else {}
    return site.train(
        task="sensor-classification",
        branches="visible",
        dataset="recordings",
        model_name_or_path=None,
        block_size=None,
        sensor_hidden_size="16",
        sensor_heads="2",
        sensor_layers="1",
        **more,
    )
