"""No file that a user names runs code unless asked: planted pickles and planted Python leave a marker if they run."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from scu_trainer.cli import train
from scu_trainer.cli.evaluation import eval as evaluation
from scu_trainer.cli.looking.board import stream_answer
from scu_trainer.cli.main import main
from scu_trainer.cli.planning import plan
from scu_trainer.cli.subjects import Subject
from scu_trainer.errors import CheckpointError, ModelError
from scu_trainer.models.loading import safety as loading_safety
from scu_trainer.models.loading.load import load_for_evaluation, load_model, load_tokenizer, prepare_for_tuning
from scu_trainer.models.loading.safety import refuse_pickle
from scu_trainer.settings import ModelSettings
from scu_trainer.train.checkpoints.format import MANIFEST
from tests import tiny


class Trap:
    """Unpickling it makes the folder ``marker``."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.fixture
def marker(tmp_path):
    """The folder that must not be there at the end of a test."""
    path = tmp_path / "marker"
    yield path
    assert not path.exists()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory) -> Path:
    return tiny.saved_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def pickled_dir(model_dir, tmp_path) -> Path:
    """The same model with its weights as pickle only."""
    folder = Path(shutil.copytree(model_dir, tmp_path / "pickled model"))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.fixture
def adapter_dir(model_dir, tmp_path) -> Path:
    """An adapter with its weights as pickle only."""
    model = prepare_for_tuning(load_model(settings(model_dir)), settings(model_dir))
    model.save_pretrained(tmp_path / "adapter")
    weights = tmp_path / "adapter" / "adapter_model.safetensors"
    torch.save(load_file(weights), weights.with_suffix(".bin"))
    weights.unlink()
    return tmp_path / "adapter"


def settings(name, **changes) -> ModelSettings:
    return ModelSettings(model_name_or_path=str(name), **changes)


def test_the_trap_works(tmp_path):
    marker, weights = tmp_path / "marker", tmp_path / "weights.bin"
    torch.save({"weight": Trap(marker)}, weights)
    torch.load(weights, weights_only=False)
    marker.rmdir()
    weights.write_bytes(pickle.dumps({"weight": Trap(marker)}))
    with pytest.raises(RuntimeError, match="magic number"):
        torch.load(weights, weights_only=False)
    marker.rmdir()


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_in_a_pickle_are_refused(pickled_dir):
    with pytest.raises(
        ModelError, match=r"pytorch_model.bin, a pickle file, and no model.safetensors.*allow_pickle: true"
    ):
        load_model(settings(pickled_dir))


def test_the_conversion_that_the_message_names_works(model_dir, pickled_dir):
    with pytest.raises(ModelError) as refusal:
        load_model(settings(pickled_dir))
    command = re.search(r"Convert it once: (python -c '.*'), or set", str(refusal.value))[1]
    exec(shlex.split(command)[2])
    converted, original = load_model(settings(pickled_dir)), load_model(settings(model_dir))
    assert tiny.same(tiny.weights_of(converted), tiny.weights_of(original))


def test_a_pickle_that_git_lfs_has_yet_to_fetch_is_not_to_be_converted(pickled_dir):
    (pickled_dir / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\n")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin holds only the address.*git lfs pull in its folder$"):
        load_model(settings(pickled_dir))


def test_an_index_of_pickles_is_refused(pickled_dir):
    (pickled_dir / "pytorch_model.bin").rename(pickled_dir / "pytorch_model-00001-of-00001.bin")
    (pickled_dir / "pytorch_model.bin.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    with pytest.raises(ModelError, match=r"pytorch_model.bin.index.json, a pickle file.*Give a repository or revision"):
        load_model(settings(pickled_dir))


def test_pickled_weights_are_read_when_asked(model_dir, pickled_dir, caplog):
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        model = load_model(settings(pickled_dir, allow_pickle=True))
    assert tiny.same(tiny.weights_of(model), tiny.weights_of(load_model(settings(model_dir))))
    assert "read from the pickle file pytorch_model.bin, tensors only" in caplog.text


def test_safetensors_come_first(model_dir, tmp_path, marker):
    folder = Path(shutil.copytree(model_dir, tmp_path / "both"))
    torch.save({"weight": Trap(marker)}, folder / "pytorch_model.bin")
    for allow in (False, True):
        load_model(settings(folder, allow_pickle=allow))


def test_code_in_a_pickle_never_runs(pickled_dir, marker):
    weights = pickled_dir / "pytorch_model.bin"
    torch.save({"weight": Trap(marker)}, weights)
    with pytest.raises(ModelError, match="a pickle file"):
        load_model(settings(pickled_dir))
    with pytest.raises(ModelError, match=r"was not read \(unsupported GLOBAL posix.mkdir") as found:
        load_model(settings(pickled_dir, allow_pickle=True))
    assert not any(advice in str(found.value) for advice in ("add_safe_globals", "weights_only", "Re-running"))
    weights.write_bytes(pickle.dumps({"weight": Trap(marker)}, protocol=2))  # as torch wrote them long ago
    with pytest.raises(ModelError, match="was not read"):
        load_model(settings(pickled_dir, allow_pickle=True))


def test_a_pickled_adapter_is_refused_and_read_when_asked(model_dir, adapter_dir, caplog):
    with pytest.raises(ModelError, match=r"adapter_model.bin, a pickle file.*Convert it once"):
        load_for_evaluation(str(adapter_dir), settings(adapter_dir))
    with pytest.raises(ModelError, match=r"adapter_model.bin, a pickle file"):
        prepare_for_tuning(load_model(settings(adapter_dir)), settings(adapter_dir))
    asked = settings(adapter_dir, allow_pickle=True)
    assert load_for_evaluation(str(adapter_dir), asked).peft_config
    assert prepare_for_tuning(load_model(asked), asked).peft_config
    assert "tensors only" in caplog.text


def test_code_in_a_pickled_adapter_never_runs(adapter_dir, marker):
    torch.save({"weight": Trap(marker)}, adapter_dir / "adapter_model.bin")
    with pytest.raises(ModelError, match="a pickle file"):
        load_for_evaluation(str(adapter_dir), settings(adapter_dir))
    with pytest.raises(ModelError, match="was not read"):
        load_for_evaluation(str(adapter_dir), settings(adapter_dir, allow_pickle=True))


def test_a_hub_repository_without_safetensors_is_refused(pickled_dir, tmp_path, monkeypatch):
    """As it lies in the Hub's cache on a machine without network."""
    commit = "c" * 40
    snapshot = tmp_path / "hub" / "models--some--model" / "snapshots" / commit
    shutil.copytree(pickled_dir, snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match=r"pytorch_model.bin, a pickle file.*Give a repository"):
        load_model(settings("some/model"))


def test_nothing_is_converted_on_the_hub_in_our_name(model_dir, monkeypatch):
    monkeypatch.delenv("DISABLE_SAFETENSORS_CONVERSION", raising=False)
    load_model(settings(model_dir))
    from transformers.utils import is_env_variable_true

    assert is_env_variable_true("DISABLE_SAFETENSORS_CONVERSION")


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["global_step4/mp_rank_00_model_states.pt", "latest", "optimizer_0/.metadata", "pytorch_model_fsdp_0/.metadata"],
)
def test_checkpoints_whose_reader_unpickles_anything_are_refused(tmp_path, name):
    checkpoint = tmp_path / "checkpoint-4"
    (checkpoint / name).parent.mkdir(parents=True)
    (checkpoint / name).touch()
    with pytest.raises(CheckpointError, match=rf"outside this run, and {re.escape(name)}.*allow_pickle: true"):
        refuse_pickle(checkpoint, allow=False)
    refuse_pickle(checkpoint, allow=True)


def test_stock_checkpoints_pass(tmp_path):
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "model.safetensors", "training_args.bin"):
        (tmp_path / name).touch()
    refuse_pickle(tmp_path, allow=False)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_code_in_a_stock_checkpoint_never_runs(tmp_path, marker, name):
    tiny.trained(tiny.llama(), tmp_path / "run", max_steps=1, save_strategy="steps", save_steps=1)
    checkpoint = tmp_path / "run" / "checkpoint-1"
    torch.save({"state": Trap(marker)}, checkpoint / name)
    (checkpoint / MANIFEST).unlink()  # which would tell of the change first
    with pytest.raises(
        CheckpointError, match=r"checkpoint-1 is damaged or holds more than tensors.*resume from another"
    ):
        tiny.trained(tiny.llama(), tmp_path / "run", resume=str(checkpoint), max_steps=2)


# -- code that comes with a model --------------------------------------------------------------------------------------

CONFIGURATION = """
from transformers import PretrainedConfig
from .helper import open_marker

class MineConfig(PretrainedConfig):
    model_type = "mine-and-nobody-elses"
"""
MODELING = """
from transformers import LlamaConfig, LlamaForCausalLM
from .configuration_mine import MineConfig

class MineForCausalLM(LlamaForCausalLM):
    config_class = MineConfig
"""


@pytest.fixture
def own_code(model_dir, tmp_path, monkeypatch) -> Path:
    """A model whose classes lie beside its weights; importing them opens ``ran``."""
    folder = Path(shutil.copytree(model_dir, tmp_path / "own_code"))
    (folder / "helper.py").write_text(f"open_marker = open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    (folder / "configuration_mine.py").write_text(CONFIGURATION)
    (folder / "modeling_mine.py").write_text(MODELING)
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "configuration_mine.MineConfig", "AutoModelForCausalLM": "modeling_mine.MineForCausalLM"}
    config |= {"model_type": "mine-and-nobody-elses", "auto_map": classes}
    (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.startswith("transformers_modules")]:
        monkeypatch.delitem(sys.modules, name)  # they lie where another test put them
    monkeypatch.setattr(loading_safety, "_announced", set())
    return folder


def test_code_of_a_model_is_not_run_unasked(own_code, tmp_path):
    load_tokenizer(settings(own_code))  # needs none of it
    with pytest.raises(ModelError) as refusal:
        load_model(settings(own_code))
    assert f"{own_code}/configuration_mine.py, {own_code}/modeling_mine.py, {own_code}/helper.py" in str(refusal.value)
    assert "trust_remote_code: true (--trust_remote_code) if you trust it" in str(refusal.value)
    assert not (tmp_path / "ran").exists()


def test_code_of_a_model_is_announced_before_it_runs(own_code, tmp_path, caplog):
    trusted = settings(own_code, trust_remote_code=True)
    with caplog.at_level(logging.WARNING, "scu_trainer"):
        loading_safety.warn_about_code(str(own_code), trusted)
        assert not (tmp_path / "ran").exists()
        for name in ("configuration_mine.py", "modeling_mine.py", "helper.py"):
            digest = hashlib.sha256((own_code / name).read_bytes()).hexdigest()
            assert f"{own_code}/{name}  sha256 {digest}" in caplog.text
        loading_safety.warn_about_code(str(own_code), trusted)
        assert len(caplog.records) == 1  # said once
        for number, load in enumerate((load_tokenizer, load_model), start=2):
            with (own_code / "helper.py").open("a") as file:
                file.write("# other code is other news\n")
            load(trusted)
            said = [record for record in caplog.records if "contains Python" in record.getMessage()]
            assert len(said) == number
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "read",
    [
        lambda trusted: evaluation.positions_of(Subject("mine", trusted)),
        lambda trusted: plan._configuration(SimpleNamespace(model=trusted)),
    ],
    ids=["eval", "plan"],
)
def test_code_is_announced_before_a_configuration_alone_is_read(own_code, tmp_path, read):
    logger, ran = logging.getLogger("scu_trainer"), []
    handler = logging.Handler()
    handler.emit = lambda record: ran.append((tmp_path / "ran").exists())
    logger.addHandler(handler)
    try:
        read(settings(own_code, trust_remote_code=True))
    finally:
        logger.removeHandler(handler)
    assert ran == [False] and (tmp_path / "ran").exists()


@pytest.mark.parametrize("trusted", [True, False])
def test_what_was_written_of_a_model_with_code_is_read_back_with_it(own_code, tmp_path, capsys, trusted):
    consent = ["--trust_remote_code"] if trusted else []
    code = main(["export", str(own_code), "--to", "safetensors", "--output", str(tmp_path / "out"), *consent])
    told = capsys.readouterr().err
    assert (code, "trust_remote_code: true (--trust_remote_code) if" in told) == ((0, False) if trusted else (2, True))
    assert (tmp_path / "out" / "modeling_mine.py").is_file() == trusted


@pytest.fixture
def run_of_own_code(own_code, tmp_path) -> Path:
    """A run that says of itself that its code may be run."""
    configuration = {"trust_remote_code": True, "dataset": "python_docs", "block_size": 32, "dataset_size": 8}
    configuration |= {"cache_dir": str(tmp_path / "cache"), "validation_split_percentage": 50}
    content = {"configuration": configuration, "data": {}, "seed": 0}
    (own_code / "training_config.json").write_text(json.dumps(content))
    return own_code


def test_the_chat_of_the_board_runs_code_of_a_run_with_consent_alone(run_of_own_code, tmp_path):
    asked = str(run_of_own_code), [{"role": "user", "content": "def"}]
    with pytest.raises(ModelError, match="trust_remote_code: true"):
        next(stream_answer(*asked))
    assert not (tmp_path / "ran").exists()
    next(stream_answer(*asked, trust_remote_code=True))
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("trusted", [True, False])
def test_prune_runs_code_of_a_run_with_consent_alone(run_of_own_code, tmp_path, capsys, trusted):
    consent = ["--trust_remote_code"] if trusted else []
    assert main(["prune", str(run_of_own_code), "--output", str(tmp_path / "out"), *consent]) == (0 if trusted else 2)
    assert (tmp_path / "ran").exists() == trusted
    assert ("trust_remote_code: true (--trust_remote_code) if" in capsys.readouterr().err) == (not trusted)


def test_code_in_another_repository_is_named_as_its_own(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"auto_map": {"AutoTokenizer": ["other/repo--tokens.Slow", null]}}'
    )
    assert loading_safety._code_references(str(tmp_path), "tokenizer_config.json", None) == [("other/repo", "tokens")]


def test_models_without_code_are_not_announced(model_dir, caplog):
    loading_safety.warn_about_code(str(model_dir), settings(model_dir, trust_remote_code=True))
    assert caplog.records == []


def test_a_run_brings_no_consent_with_it(tmp_path):
    """Its training_config.json may have been written by anybody."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "adapter_config.json").write_text("{}")
    configuration = {"model_name_or_path": "x", "trust_remote_code": True, "allow_pickle": True}
    content = {"configuration": configuration, "data": {}, "seed": 0}
    (run / "training_config.json").write_text(json.dumps(content))
    for asked in (False, True):
        options = evaluation.EvalOptions(trust_remote_code=asked, allow_pickle=asked)
        subject = evaluation._subjects(str(run), options)[0]
        assert (subject.model.trust_remote_code, subject.model.allow_pickle) == (asked, asked)


def test_the_command_refuses_both_with_one_message(own_code, pickled_dir, tmp_path, capsys):
    for folder, expected in ((own_code, "trust_remote_code: true"), (pickled_dir, "allow_pickle: true")):
        words = ["--model_name_or_path", str(folder), "--dataset", "python_docs", "--dataset_size", "4"]
        words += ["--use_cpu", "true", "--cache_dir", str(tmp_path / "cache"), "--output_dir", str(tmp_path / "run")]
        assert train.main(words) == 2
        message = capsys.readouterr().err
        assert expected in message and "Traceback" not in message
        assert not (tmp_path / "run").exists()


def test_a_dataset_that_is_a_script_is_refused(tmp_path, capsys):
    words = ["--model_name_or_path", str(tiny.saved_llama(tmp_path / "model")), "--dataset", "some/where.py"]
    words += ["--use_cpu", "true", "--cache_dir", str(tmp_path / "cache"), "--output_dir", str(tmp_path / "run")]
    assert train.main(words) == 2
    assert "scripts are no longer supported" in capsys.readouterr().err
