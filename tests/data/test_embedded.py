from __future__ import annotations

import ast
import platform

import pytest

from scu_trainer.data import embedded
from scu_trainer.data.embedded import LEFT_OUT, docstrings_of, python_docs, read_embedded, stdlib_docstrings
from scu_trainer.settings import EMBEDDED_DATASETS


def test_every_embedded_name_has_an_extractor():
    assert set(embedded.EXTRACTORS) == set(EMBEDDED_DATASETS)


def test_python_docs_are_one_document_per_topic():
    from pydoc_data.topics import topics

    documents = dict(python_docs())
    assert documents.keys() == topics.keys()
    assert topics["while"].strip() in documents["while"]


def test_docstrings_come_without_code_and_tests(embedded_cache):
    documents = {
        record.place: record.value["body"] for record in read_embedded("stdlib_docstrings", embedded_cache, "body")
    }
    assert list(documents) == sorted(documents, key=lambda name: name.split("/"))
    assert "Keep a running average" not in documents["json/decoder.py"]
    assert "Simple JSON <https://json.org> decoder" in documents["json/decoder.py"]
    assert "raise JSONDecodeError" not in documents["json/decoder.py"]
    assert all(LEFT_OUT.isdisjoint(name.split("/")) for name in documents)
    assert min(map(len, documents.values())) >= embedded.SMALLEST_DOCUMENT


EVERYWHERE = """
class Outer:
    def method(self): "in a class"
try:
    def tried(): "in try"
except ValueError:
    def caught(): "in except"
else:
    if tried:
        def passed(): "after try"
finally:
    def ended(): "in finally"
if tried(lambda: [1 if x else 2 for x in ()]):
    async def chosen():
        "in if"
        match ended():
            case 1:
                class Matched: "in a case"
else:
    for each in ():
        def repeated(): "in for"
    else:
        with open("x") as file:
            def within(): "in with"
"""


def test_docstrings_are_found_wherever_a_statement_can_stand():
    documented = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    walked = [node for node in ast.walk(ast.parse(EVERYWHERE)) if isinstance(node, documented)]
    expected = [f"{node.name}\n{text}" for node in walked if (text := ast.get_docstring(node))]
    assert list(docstrings_of(EVERYWHERE)) == expected and len(expected) == 9


def test_source_files_are_whole(embedded_cache):
    import json.decoder
    from pathlib import Path

    documents = {
        record.place: record.value["text"] for record in read_embedded("stdlib_source", embedded_cache, "text")
    }
    assert documents["json/decoder.py"] == Path(json.decoder.__file__).read_text()


def test_extraction_is_the_same_twice(embedded_cache):
    cached = [
        (record.place, record.value["text"]) for record in read_embedded("stdlib_docstrings", embedded_cache, "text")
    ]
    assert list(stdlib_docstrings()) == cached


def test_extraction_is_cached(embedded_cache, monkeypatch):
    first = list(read_embedded("stdlib_docstrings", embedded_cache, "text"))

    def fail():
        raise AssertionError("extracted again")

    monkeypatch.setitem(embedded.EXTRACTORS, "stdlib_docstrings", fail)
    assert list(read_embedded("stdlib_docstrings", embedded_cache, "text")) == first


def test_identity_follows_the_python_version(monkeypatch):
    before = embedded.embedded_identity("python_docs")
    monkeypatch.setattr(platform, "python_version", lambda: "9.9.9")
    assert embedded.embedded_identity("python_docs") != before


def test_python_without_sources_is_an_error_of_the_user(tmp_path, monkeypatch):
    from scu_trainer.errors import DataError

    monkeypatch.setattr(embedded.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "nowhere")})
    with pytest.raises(DataError, match="its source files are missing"):
        next(read_embedded("stdlib_source", tmp_path, "text"))
