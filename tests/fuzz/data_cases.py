"""Paths of data that are none, files that cannot be read, and rows of all kinds."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import random
from pathlib import Path

from tests.fuzz.site import ROWS, Site

GOOD = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
SUFFIXES = (".jsonl", ".json", ".csv", ".txt", ".parquet", ".jsonl.gz", ".json.gz", ".csv.gz", ".txt.gz")
ODD_SUFFIXES = ("", ".JSONL", ".Json", ".TXT", ".CSV", ".Parquet", ".gz", ".JSONL.GZ", ".parquet.gz", ".tsv", ".xml",
                ".jsonl.bak", ".zip", ".", ".jsonl.", ".arrow", ".docx", ".jsonl.zst", ".bz2")  # fmt: skip
NESTED = 5000
HUGE = "9" * 5000


def data_path(chance: random.Random, folder: Path, site: Site) -> list[str]:
    make = chance.choice([_suffix, _suffix, _content, _content, _content, _folder, _special, _unreadable, _missing])
    name = make(chance, folder)
    field = chance.choice(["dataset"] * 4 + ["eval_dataset", "chat_template"])
    changes = {field: name}
    if chance.random() < 0.15:
        changes["streaming"] = "true"
    if chance.random() < 0.2:
        changes |= _other_task(chance, name)
    return site.train(**changes)


def _other_task(chance: random.Random, name: str) -> dict:
    task = chance.choice(["image-classification", "word-generation", "sensor-classification"])
    drop = {"block_size": None} if task != "word-generation" else {"category_column": ""}
    return {
        "task": task,
        "dataset": name,
        "eval_dataset": None,
        "chat_template": None,
        "model_name_or_path": None,
        "streaming": None,
        **drop,
    }


def _suffix(chance: random.Random, folder: Path) -> str:
    suffix = chance.choice((*SUFFIXES, *ODD_SUFFIXES))
    content = gzip.compress(GOOD) if suffix.lower().endswith(".gz") and chance.random() < 0.7 else GOOD
    return _written(folder, chance.choice(["data", "my data", "dätä", "-x"]) + suffix, content)


def _content(chance: random.Random, folder: Path) -> str:
    content = chance.choice(
        [
            b"",
            b"\n",
            b" \n \n",
            b"\xef\xbb\xbf",
            b"\0" * 64,
            b"[]",
            b"{}",
            b"null",
            b"[",
            b"{",
            b'"text"',
            b"[[[]]]",
            b"\xff\xfe" + "text".encode("utf-16-le"),
            GOOD[:-7],
            b"PAR1",
            b"PAR1" + bytes(64) + b"PAR1",
            gzip.compress(b""),
            gzip.compress(GOOD)[:-9],
            gzip.compress(GOOD)[:30],
            b"\x1f\x8b",
            b"text\n",
            b"text,text\na,b\n",
            b'text\n"',
            GOOD.replace(b"fox", b"f\xe9x"),
            chance.randbytes(500),
            b"[" * NESTED,
            b'{"a":' * NESTED,
            b"a,b\n1,2\n",
            b"[" + GOOD.replace(b"\n", b",")[:-1] + b"]",
            b'{"text": "x"} {"text": "y"}',
            b"[1, 2]",
            b"NaN",
            b"[NaN]",
        ]
    )
    name = "data" + chance.choice(SUFFIXES)
    if name.endswith(".gz") and chance.random() < 0.5:
        content = gzip.compress(content)
    return _written(folder, name, content)


def _folder(chance: random.Random, folder: Path) -> str:
    inside = folder / "data"
    inside.mkdir()
    kind = chance.randrange(9)
    if kind == 1:
        (inside / "readme.md").write_text("nothing here")
    elif kind == 2:
        (inside / "a.jsonl").write_bytes(b"")
    elif kind == 3:
        (inside / "state.json").write_bytes(chance.choice([b"", b"{}", b"[", b"[]", b'{"_data_files": 3}']))
        (inside / "dataset_info.json").write_bytes(chance.choice([b"", b"{}", b"null"]))
    elif kind == 4:
        (inside / "dataset_dict.json").write_bytes(
            chance.choice([b"", b"{}", b'{"splits": ["a"]}', b"\xff", b'{"splits": 3}'])
        )
    elif kind == 5:
        (inside / "a.jsonl").symlink_to("a.jsonl")
    elif kind == 6:
        (inside / "a.JSONL").write_bytes(GOOD)
        (inside / "b.jsonl.gz").write_bytes(gzip.compress(GOOD))
    elif kind == 7:
        (inside / "train.jsonl").write_bytes(GOOD)
        (inside / "validation.csv").write_bytes(b"text\n")
    elif kind == 8:
        (inside / "x.jsonl").mkdir()
        os.mkfifo(inside / "fifo.jsonl")
    return "data"


def _special(chance: random.Random, folder: Path) -> str:
    os.mkfifo(folder / "pipe.jsonl")
    return chance.choice(
        [
            "pipe.jsonl",
            "/dev/null",
            "/dev/zero",
            "/dev/stdin",
            "/dev/full",
            "/proc/self/mem",
            "/proc",
            "/proc/self/maps",
            "/dev",
        ]
    )


def _unreadable(chance: random.Random, folder: Path) -> str:
    kind = chance.randrange(4)
    if kind == 0:
        os.symlink("loop.jsonl", folder / "loop.jsonl")
        return "loop.jsonl"
    if kind == 1:
        os.symlink("nowhere", folder / "link.jsonl")
        return "link.jsonl"
    path = _written(folder, "data.jsonl", GOOD)
    if kind == 2:
        return f"{path}/below.jsonl"
    os.chmod(folder / path, 0)  # no hindrance for root
    return path


def _missing(chance: random.Random, folder: Path) -> str:
    return chance.choice(
        [
            "no.jsonl",
            "./no",
            "no/such/folder/x.txt",
            "~/no.csv",
            "~nobody/x.csv",
            "no\\way.txt",
            "..",
            ".",
            "/",
            "//",
            "a//b",
            "%s",
            "{}",
            "C:\\data.csv",
            "http://x/y.jsonl",
            "file:///x.jsonl",
            "s3://b/k.jsonl",
            "*",
            "data.jsonl?",
            "no/id",
            " ",
            "\n",
            "train[:10%]",
            "a b/c",
            "-",
            "--",
            "x@y/z",
            "ünïcode/naïve",
            "\udcff.jsonl",
            "stdlib_docstring",
            "a/b/c",
        ]
    )


def _written(folder: Path, name: str, content: bytes) -> str:
    (folder / name).write_bytes(content)
    return name


VALUES = ("", " ", "\0", "a\0b", "\ud800", "x\udfffy", "\u202e", "\ufeff", 0, -1, 1.5, 10**30, 1e308, None, True, [],
          ["x"], {}, {"a": 1}, [[]], [None], "x" * 20000, "😀" * 100, [{"role": "user", "content": "hi"}],
          [{"role": 3, "content": []}], [{"from": [], "value": {}}], [{"role": "user"}], [{"role": "\ud800", "content":
          "\ud800"}, {"role": "assistant", "content": "ok"}], "<|endoftext|>", "{{ x }}", "nan")  # fmt: skip
COLUMNS = ("text", "prompt", "completion", "messages", "conversations", "tools", "", "\ud800", "Text", "category")


def rows(chance: random.Random, folder: Path, site: Site) -> list[str]:
    name = chance.choice([_json_lines, _json_lines, _json_lines, _csv, _parquet, _text])(chance, folder)
    changes = {"dataset": name}
    if chance.random() < 0.5:
        changes["skip_bad_rows"] = "true"
    if chance.random() < 0.15:
        changes["text_column"] = chance.choice(COLUMNS)
    if chance.random() < 0.1:
        changes["streaming"] = "true"
    if chance.random() < 0.15:
        changes |= {
            **_other_task(chance, name),
            "task": "word-generation",
            "category_column": "category",
            "block_size": "16",
        }
    return site.train(**{key: value for key, value in changes.items() if not _has_surrogate(value)})


def _has_surrogate(value: str | None) -> bool:
    return value is not None and any("\ud800" <= letter <= "\udfff" for letter in value)


def _a_row(chance: random.Random) -> bytes:
    kind = chance.randrange(12)
    if kind == 0:
        return b'{"text": ' + b"[" * NESTED + b"]" * NESTED + b"}"
    if kind == 1:
        return b"[" * NESTED
    if kind == 2:
        return b'{"text": ' + HUGE.encode() + b"}"
    if kind == 3:
        return b'{"text": "caf\xe9"}'
    if kind == 4:
        return b'{"text": "a\\ud800b"}'
    if kind == 5:
        return chance.choice([b"\0", b'{"text": "a\0b"}', b'{"text": "x", "text": "y"}', b"{'text': 'x'}", b'{"text"'])
    if kind == 6:
        return chance.choice([b"NaN", b"-Infinity", b"1e999", b'{"text": NaN}', b"null", b"true", b"3", b'"x"'])
    columns = chance.sample(COLUMNS, chance.randint(1, 3))
    return json.dumps({column: chance.choice(VALUES) for column in columns}).encode()


def _json_lines(chance: random.Random, folder: Path) -> str:
    lines = GOOD.splitlines() * chance.randint(0, 1)
    for _ in range(chance.randint(1, 4)):
        lines.insert(chance.randint(0, len(lines)), _a_row(chance))
    name = chance.choice(["rows.jsonl", "rows.jsonl", "rows.json", "rows.jsonl.gz", "rows.json list"])
    content = b"\n".join(lines) + b"\n"
    if name.endswith("list"):
        name, content = "rows.json", b"[" + b",".join(lines) + b"]"
    return _written(folder, name, gzip.compress(content) if name.endswith(".gz") else content)


def _csv(chance: random.Random, folder: Path) -> str:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(chance.choice([["text"], ["text", "category"], ["Text"], [], [""], ["text", "text"], ["a", "b"]]))
    for row in ROWS:
        writer.writerow([row["text"], "x"][: chance.randint(1, 2)])
    content = out.getvalue().encode()
    junk = chance.choice([b"", b"\0", b"\xff\n", b'"open\n', b"a,b,c,d,e\n", b'"a"b,c\n', b"\r\r\n", b"x" * 200_000])
    return _written(folder, chance.choice(["rows.csv", "rows.csv.gz"]), content + junk)


def _parquet(chance: random.Random, folder: Path) -> str:
    import pyarrow
    from pyarrow import parquet

    columns = chance.choice(
        [
            {"text": ["a b c d"] * 12},
            {"text": [b"a\xff"] * 12},
            {"text": [1, 2, 3]},
            {"text": [["a"], ["b"]]},
            {"text": [None, "x y z w"] * 6},
            {"text": [{"a": 1}] * 3},
            {"other": ["x"]},
            {"text": []},
            {"messages": [[{"role": "user", "content": "hi"}]] * 4},
            {"prompt": ["a"] * 9, "completion": ["b c d"] * 9},
        ]
    )
    parquet.write_table(pyarrow.table(columns), folder / "rows.parquet")
    if chance.random() < 0.3:
        content = bytearray((folder / "rows.parquet").read_bytes())
        for _ in range(chance.randint(1, 20)):
            content[chance.randrange(len(content))] = chance.randrange(256)
        (folder / "rows.parquet").write_bytes(bytes(content))
    return "rows.parquet"


def _text(chance: random.Random, folder: Path) -> str:
    content = chance.choice(
        [
            b"",
            b"\n\n\n",
            b"\xe9",
            b"a\0b\n\n\nc d e f g",
            b"one two three four five " * 50,
            b"\x1a",
            b"a\r\rb\r\r\rc d e f",
            b"\xed\xa0\x80 x y z",
            b"x" * 100_000,
            b"\xef\xbb\xbfa b c d e f",
        ]
    )
    return _written(folder, "rows.txt", content)


PLACES = ("dataset", "eval_dataset", "model_name_or_path", "output_dir", "chat_template", "cache_dir", "offload_folder",
          "resume_from_checkpoint", "deepspeed", "config", "run_name", "hub_model_id", "dataset_config_name",
          "text_column", "attn_implementation", "dataset_split", "model_revision", "accelerator_config")  # fmt: skip


def long_names(chance: random.Random, folder: Path, site: Site) -> list[str]:
    name = chance.choice(
        [
            "x" * 256,
            "x" * 300 + ".jsonl",
            "ä" * 200,
            "a/" * 2100 + "b",
            "/" + "x" * 5000,
            "./" + "y" * 256,
            "x" * 100_000,
            "a/" * 30_000,
            "x" * 255,
            "/".join(["z" * 250] * 15),
            "~" + "x" * 300,
            ("x" * 254 + "/") * 20,
            "good/" + "x" * 256 + "/good",
        ]
    )
    place = chance.choice(PLACES)
    words = site.train(**({} if place == "config" else {place: name}))
    if place == "config":
        return [*words, "--config", name]
    if chance.random() < 0.3:
        (folder / "c.yaml").write_text(json.dumps({place: name}))
        return [*site.train(**{place: None}), "--config", "c.yaml"]
    return words


def odd_names(chance: random.Random, folder: Path, site: Site) -> list[str]:
    """Names that the system takes and programs stumble over."""
    name = chance.choice(
        [
            b"caf\xe9",
            b"\xff\xfe",
            b"a\nb",
            b"a b",
            b"-x",
            b"--y",
            b"\x1b[31m",
            b"%s%n",
            b"'\"",
            b"{x}",
            b"[bold]",
            b"$HOME",
            b"~",
            b"\xe2\x80\xae",
            b"\xf0\x9f\x98\x80",
        ]
    )
    shown = os.fsdecode(name)
    place = chance.choice(["dataset", "folder", "output_dir", "model_name_or_path", "cache_dir", "run_name", "config"])
    if place == "dataset":
        (folder / f"{shown}.jsonl").write_bytes(GOOD)
        return site.train(dataset=f"{shown}.jsonl")
    if place == "folder":
        (folder / shown).mkdir()
        (folder / shown / "a.jsonl").write_bytes(GOOD)
        return site.train(dataset=shown)
    if place == "model_name_or_path":
        (folder / shown).symlink_to(site.model)
        return site.train(model_name_or_path=f"./{shown}")
    if place == "config":
        (folder / shown).write_text("max_steps: 1\n")
        return [*site.train(), "--config", shown]
    return site.train(**{place: shown})


def output_dir(chance: random.Random, folder: Path, site: Site) -> list[str]:
    kind = chance.randrange(20)
    (folder / "file").write_text("mine")
    (folder / "kept").mkdir()
    (folder / "kept" / "notes.txt").write_text("mine")
    os.symlink("nowhere", folder / "broken")
    os.symlink("self", folder / "self")
    os.mkfifo(folder / "pipe")
    names = [
        ".",
        "/",
        "..",
        "",
        "file",
        "file/below",
        "broken",
        "broken/below",
        "self",
        "pipe",
        "/dev/null",
        "/proc/x",
        "/sys/x",
        "kept/../..",
        "~",
        "./",
        "//",
        " ",
        "/root",
        "/dev/null/x",
    ]
    if chance.random() < 0.15:
        return site.train("--test_run", output_dir=names[kind])
    if chance.random() < 0.15:
        return site.train("--preflight_only", output_dir=names[kind])
    if chance.random() < 0.15:
        (folder / "c.json").write_text(json.dumps({"output_dir": chance.choice([*names, 3, True, [], {}, ["a"]])}))
        return [*site.train(output_dir=None), "--config", "c.json"]
    return site.train(output_dir=names[kind])
