"""The figures of ``house.py`` stay where they are: no import circle, small rooms, no loop's name in the step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import house

MOST_FILES = 16


def test_nothing_imports_what_imports_it():
    assert house.circles(house.imports()) == []


def test_no_folder_has_more_files_than_a_person_holds_in_mind():
    assert {folder: count for folder, count in house.folders().items() if count > MOST_FILES} == {}


def test_the_trainer_names_no_loop():
    assert house.lines_that_name_a_loop() == []


def test_the_name_of_a_class_has_one_meaning():
    assert house.names_of_several_classes() == {}


def test_one_step_crosses_no_more_files_than_it_does_today():
    calls, entered = house.files_of_a_step()
    assert "train/trainer.py" in calls and "train/loops/memory.py" in calls
    assert len(calls) <= 51 and entered <= 20


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a": "import p.b", "b": "import p.a"}, [["p.a", "p.b"]]),
        ({"a": "def f():\n    from p import b", "b": "if 1:\n    from p.a import x"}, [["p.a", "p.b"]]),
        ({"a": "from . import b", "b": "from .c import x", "c": "from p import a"}, [["p.a", "p.b", "p.c"]]),
        ({"a": "import p.b", "b": "import os", "c": "import p.a"}, []),
    ],
)
def test_a_circle_is_seen(tmp_path, files, expected):
    package = tmp_path / "p"
    package.mkdir()
    for name, text in {"__init__": "", **files}.items():
        (package / f"{name}.py").write_text(text)
    assert house.circles(house.imports(package)) == expected


def test_a_name_of_two_classes_is_seen(tmp_path):
    (tmp_path / "a.py").write_text("class Twin: ...\nclass _Own: ...\nclass Other: ...\n")
    (tmp_path / "b.py").write_text("class Twin: ...\nclass _Own: ...\n")
    assert house.names_of_several_classes(tmp_path) == {"Twin": ["a.py", "b.py"]}


def test_a_loop_that_is_named_is_seen(tmp_path):
    path = Path(tmp_path) / "trainer.py"
    path.write_text("def __init__(self):\n    self.memory = 1\ndef step(self):\n    pass\n    self.curriculum.act()\n")
    assert house.lines_that_name_a_loop(path) == ["self.curriculum.act()"]
