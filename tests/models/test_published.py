"""Which files of a folder are those of its model."""

from __future__ import annotations

import json

import pytest

from scu_trainer.models.published import model_files, names_like


@pytest.mark.parametrize(("config", "is_code"), [({"auto_map": {"AutoModel": "net.Net"}}, True), ({}, False)])
def test_python_files_belong_to_a_model_that_has_code_of_its_own(tmp_path, config, is_code):
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("model.safetensors", "net.py", "training_args.bin"):
        (tmp_path / name).touch()
    code = ["net.py"] if is_code else []
    assert names_like(tmp_path, model_files(tmp_path)) == ["config.json", "model.safetensors", *code]
