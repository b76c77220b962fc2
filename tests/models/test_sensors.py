"""TRIDENT: masks, branches, files, adapters on its blocks, blocks that are computed again, layers that lie on disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from scu_trainer.cli.machine.optimize import CACHE_KINDS
from scu_trainer.data.sensors.collate import SensorCollator, mask_name
from scu_trainer.data.sensors.synthetic import synthetic
from scu_trainer.errors import ModelError
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.load import prepare_for_tuning
from scu_trainer.models.loading.offload_linears import offload_linears
from scu_trainer.models.loading.offloaded import has_offloaded_weights
from scu_trainer.models.quantize import quantizable_layers, quantized_modules
from scu_trainer.models.sensors import TridentConfig, TridentForSensorClassification
from scu_trainer.models.sensors.loading import (
    Heads,
    adapter_plan,
    branches_of,
    input_shapes,
    load_scored_trident,
    make_trident,
    new_trident,
    require_same_classes,
    stored_config,
    trained_label_names,
)
from scu_trainer.models.sensors.trident_branches import BRANCHES as MODULES
from scu_trainer.models.sensors.trident_branches import _matching_frames
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.sensors import BRANCHES, DEFAULT_BRANCHES, WITH_TRANSFORMER, SensorSettings
from scu_trainer.train.fixtures.random_start import random_start
from tests import processes
from tests.recordings import SHAPES, TINY, rows_of, trident

CPU = torch.device("cpu")
NAMES = ["0", "1", "2", "3"]


def batch_of(count: int = 6, missing_share: float = 0.5) -> dict[str, torch.Tensor]:
    return SensorCollator(SHAPES)(rows_of(synthetic(count, 4, 0, missing_share)))


@pytest.fixture
def batch():
    return batch_of()


@torch.no_grad()
def logits(model, batch) -> torch.Tensor:
    return model.eval()(**{name: value for name, value in batch.items() if name != "labels"}).logits


def own(**changes) -> SensorSettings:
    return SensorSettings(**{"sensor_hidden_size": 16, "sensor_heads": 2, "sensor_channels": 4, **changes})


# -- masks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BRANCHES)
def test_what_stands_in_a_missing_branch_does_not_count(batch, name):
    others = [other for other, arrays in BRANCHES.items() if other == name or not {*arrays} & {*BRANCHES[name]}]
    model, branch = trident(branches=others), list(BRANCHES).index(name)
    batch["branch_mask"][:, branch] = False
    before = logits(model, batch)
    for item in BRANCHES[name]:
        filling = 200 if item == "visible" else float("nan")
        batch[item] = torch.full_like(batch[item], filling)
    assert torch.equal(logits(model, batch), before)
    batch["branch_mask"][:, branch] = True
    assert not torch.equal(logits(model, batch), before)


def test_a_missing_branch_has_exactly_no_gradient(batch):
    model = trident()
    batch["branch_mask"][:, 0] = False
    model(**batch).loss.backward()
    gradients = [weight.grad for weight in model.trident.branches["visible"].parameters()]
    assert all(gradient is not None and not gradient.any() for gradient in gradients)


def test_padding_does_not_count(batch):
    model = trident(branches=list(BRANCHES))
    before = logits(model, batch)
    for name in SHAPES:
        mask = "cooling_mask" if name == "cooling_curve" else f"{name}_mask"
        fill = 77 if name == "visible" else float("inf")
        padding = torch.full((len(batch[name]), 5, *batch[name].shape[2:]), fill).to(batch[name].dtype)
        batch[name] = torch.cat([batch[name], padding], dim=1)
        batch[mask] = torch.cat([batch[mask], torch.zeros(len(padding), 5, dtype=torch.bool)], dim=1)
    assert (logits(model, batch) - before).abs().max() < 1e-6


def test_a_row_does_not_depend_on_the_others():
    model, rows = trident(branches=list(BRANCHES)), rows_of(synthetic(6, 4, 0, 0.5))
    collate = SensorCollator(SHAPES)
    together = logits(model, collate(rows))
    assert (logits(model, collate(rows[::-1])).flip(0) - together).abs().max() < 1e-6
    alone = torch.cat([logits(model, collate([row])) for row in rows])
    assert (alone - together).abs().max() < 1e-6


def test_the_order_of_frames_counts(batch):
    """Motion is seen: the same frames backwards are another recording."""
    model = trident(branches=["visible"])
    full = {name: value for name, value in batch_of(4, 0.0).items() if name.startswith("visible")}
    frames = int(full["visible_mask"].sum(dim=1).min())
    forwards = {"visible": full["visible"][:, :frames]}
    backwards = {"visible": forwards["visible"].flip(1)}
    assert (logits(model, forwards) - logits(model, backwards)).abs().max() > 1e-4


def test_without_masks_everything_counts(batch):
    model = trident()
    plain = {name: torch.nan_to_num(batch[name]) for name in SHAPES}
    masks = {name: torch.ones_like(value) for name, value in batch.items() if name.endswith("_mask")}
    assert torch.equal(logits(model, plain), logits(model, {**plain, **masks}))


def test_a_row_without_any_branch_is_a_number(batch):
    batch["branch_mask"][:] = False
    found = logits(trident(), batch)
    assert torch.isfinite(found).all() and torch.equal(found[0], found[1])


@pytest.mark.parametrize("branch", BRANCHES)
def test_each_branch_is_a_model_of_its_own(batch, branch):
    model = trident(branches=[branch])
    assert list(model.trident.branches) == [branch] and model.main_input_name == BRANCHES[branch][0]
    reads = {*BRANCHES[branch], *map(mask_name, BRANCHES[branch])}
    needed = {name: value for name, value in batch.items() if name in ("labels", "branch_mask") or name in reads}
    model(**needed).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_branches_read_what_the_settings_say():
    assert tuple(BRANCHES) == TridentConfig.ALL_BRANCHES
    assert {name: branch.inputs for name, branch in MODULES.items()} == BRANCHES
    with_transformer = {name for name, part in trident(branches=list(BRANCHES)).parts().items() if has_layers(part)}
    assert with_transformer == {*WITH_TRANSFORMER}
    assert tuple(TridentConfig().branches) == DEFAULT_BRANCHES


def has_layers(part) -> bool:
    return any(".layers." in f".{name}" for name, _ in part.named_modules())


def test_frames_of_two_cameras_are_paired_by_their_place_in_the_recording():
    """Six visible frames beside three infrared ones; four beside one; none at all. Padding moves nothing."""
    frames = torch.arange(6)[None].expand(3, -1)
    mask = torch.arange(6)[None] < torch.tensor([[6], [4], [0]])
    other = torch.arange(5)[None] < torch.tensor([[3], [1], [2]])
    found = _matching_frames(frames, mask, other)
    assert found[0, :3].tolist() == [0, 2, 4] and found[1, :1].tolist() == [0] and found.shape == (3, 5)


@pytest.mark.parametrize("gone", ["visible", "infrared"])
def test_two_cameras_side_by_side_say_nothing_of_a_recording_that_lacks_one(batch, gone):
    model, other = trident(branches=["dual_vision", "geometry"]), {"visible": "infrared", "infrared": "visible"}[gone]
    batch[f"{gone}_mask"][:] = False
    before = logits(model, batch)
    batch[other] = torch.full_like(batch[other], 7)
    assert torch.equal(logits(model, batch), before)
    assert torch.equal(before, logits(trident(branches=["dual_vision", "geometry"]), {**batch, gone: batch[gone] * 0}))


def test_large_and_small_numbers_of_geometry_both_count():
    branch = trident(branches=["geometry"]).trident.branches["geometry"]
    numbers = torch.tensor([[[4000.0, 0.1, 0.2, 150.0]]])
    before, mask = branch(numbers, torch.ones(1, 1, dtype=torch.bool))
    assert mask.all() and before.abs().max() < 50
    for place, change in ((0, 1000.0), (1, 0.3), (3, 60.0)):
        moved = numbers.clone()
        moved[0, 0, place] += change
        assert (branch(moved, mask)[0] - before).abs().max() > 1e-3


def test_an_input_that_is_not_there_is_named(batch):
    with pytest.raises(ValueError, match="the branch infrared reads cooling_curve"):
        trident()(visible=batch["visible"], infrared=batch["infrared"], kinematics=batch["kinematics"])


def test_the_loss_is_a_mean_or_a_sum_over_the_items(batch):
    model = trident().eval()
    mean, part = model(**batch).loss, model(**batch, num_items_in_batch=torch.tensor(12)).loss
    assert part.item() == pytest.approx(mean.item() / 2, rel=1e-6)


def test_attention_goes_through_sdpa(batch, monkeypatch):
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        "torch.nn.functional.scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    logits(trident(), batch)
    assert len(calls) == 3  # visible, kinematics, fusion


# -- reports -----------------------------------------------------------------------------------------------------------

WORDS = ["<pad>", "<unk>", "<bos>", "<eos>", *"abcdef"]
HEAD = {"report_words": WORDS, "report_length": 5}


def with_reports(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Six rows with reports of one to three words, the last without any."""
    ids = torch.full((6, 5), -100)
    for row, words in enumerate(([4], [5, 6], [7, 8, 9], [4, 4], [6])):
        ids[row, : len(words) + 2] = torch.tensor([2, *words, 3])
    return {**batch, "report_ids": ids}


def test_the_loss_of_a_report_is_that_of_its_words_beside_that_of_the_class(batch):
    model = trident(**HEAD, report_weight=0.5).eval()
    batch = with_reports(batch)
    with torch.no_grad():
        output, plain = model(**batch), model(**{**batch, "report_ids": None})
        collected = model.trident(**{name: value for name, value in batch.items() if name in MASKED})
        steps = [model.report(collected, batch["report_ids"][:, :time].clamp(min=0))[:, -1] for time in range(1, 5)]
    expected = torch.zeros(6)
    for row, count in enumerate((2, 3, 4, 3, 2, 0)):
        chosen = [steps[time][row].log_softmax(dim=0)[batch["report_ids"][row, time + 1]] for time in range(count)]
        expected[row] = -sum(chosen) if count else 0.0
    counts = torch.tensor([2.0, 3, 4, 3, 2, 0])
    assert torch.allclose(output.report_scores[:, 0], expected, atol=1e-5)
    assert torch.equal(output.report_scores[:, 1], counts)
    added = 0.5 * (expected / counts.clamp(min=1)).mean()
    assert output.loss.item() == pytest.approx((plain.loss + added).item(), rel=1e-5)
    part = model(**batch, num_items_in_batch=torch.tensor(12)).loss
    assert part.item() == pytest.approx(output.loss.item() / 2, rel=1e-5)
    assert torch.equal(output.logits, plain.logits) and plain.report_scores is None


MASKED = {*SHAPES, *map(mask_name, SHAPES), "branch_mask"}


def test_a_later_word_does_not_change_what_stands_before_it(batch):
    model = trident(**HEAD).eval()
    collected = model.trident(**{name: value for name, value in batch.items() if name in MASKED})
    ids = torch.tensor([[2, 4, 5, 6]] * 6)
    changed = torch.tensor([[2, 4, 5, 9]] * 6)
    before, after = model.report(collected, ids), model.report(collected, changed)
    assert torch.allclose(before[:, :3], after[:, :3], atol=1e-6) and not torch.allclose(before[:, 3], after[:, 3])
    other = model.report(collected.flip(0), ids)
    assert torch.allclose(other.flip(0), before, atol=1e-6) and not torch.allclose(other, before)


def test_a_report_counts_as_exact_where_it_is_what_the_model_writes(batch):
    model = trident(**HEAD).eval()
    texts = model.generate_report(**batch)
    assert len(texts) == 6 and all({*text.split()} <= {*WORDS} for text in texts)
    ids = torch.full((6, 8), -100)
    for row, text in enumerate(texts):
        numbers = [2, *(WORDS.index(word) for word in text.split()), 3]
        ids[row, : len(numbers)] = torch.tensor(numbers)
    ids[0, 1] = 4 if ids[0, 1] != 4 else 5
    with torch.no_grad():
        exact = model(**{**batch, "report_ids": ids}).report_scores[:, 2]
    ended = torch.tensor([len(text.split()) < model.config.report_length for text in texts])
    assert not exact[0] and torch.equal(exact[1:].bool(), ended[1:])


def test_a_model_without_a_report_head_writes_none(batch):
    with pytest.raises(ValueError, match="no report head"):
        trident().generate_report(**batch)
    assert not any("report" in name for name in trident().state_dict())


def test_a_report_head_is_kept_or_added(tmp_path):
    stored = trident(**HEAD)
    stored.config.id2label = dict(enumerate(NAMES))
    stored.save_pretrained(tmp_path / "with")
    settings = ModelSettings(model_name_or_path=str(tmp_path / "with"), tuning="full")
    again, lines = make_trident(settings, own(), Heads(NAMES, WORDS, 5), SHAPES, CPU)
    assert torch.equal(again.report.embedding.weight, stored.report.embedding.weight) and len(lines) == 1
    plain = trident()
    plain.config.id2label = dict(enumerate(NAMES))
    plain.save_pretrained(tmp_path / "without")
    settings = ModelSettings(model_name_or_path=str(tmp_path / "without"), tuning="full")
    more, lines = make_trident(settings, own(), Heads(NAMES, WORDS, 5, 0.25), SHAPES, CPU)
    assert more.report.words == tuple(WORDS) and "head for reports is new: 10 words" in lines[1]
    assert torch.equal(more.classifier.weight, plain.classifier.weight) and more.config.report_weight == 0.25


# -- files -------------------------------------------------------------------------------------------------------------


def test_known_to_the_auto_classes(tmp_path, batch):
    model = trident()
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), TridentConfig)
    for auto in (AutoModel, AutoModelForSequenceClassification):
        loaded = auto.from_pretrained(tmp_path)
        assert isinstance(loaded, TridentForSensorClassification)
        assert torch.equal(logits(loaded, batch), logits(model, batch))


def test_loads_where_this_project_is_not_installed(tmp_path, batch):
    model = trident(**HEAD)
    model.save_pretrained(tmp_path / "model")
    expected, reports = logits(model, batch), model.generate_report(**batch)
    torch.save({name: value for name, value in batch.items() if name != "labels"}, tmp_path / "batch.pt")
    code = f"""
import sys
assert not [name for name in sys.modules if name.startswith("scu_trainer")]
sys.modules["scu_trainer"] = None
import torch; from transformers import AutoModel
model = AutoModel.from_pretrained({str(tmp_path / "model")!r}, trust_remote_code=True).eval()
with torch.no_grad():
    batch = torch.load({str(tmp_path / "batch.pt")!r})
    torch.save(model(**batch).logits, {str(tmp_path / "logits.pt")!r})
    print("reports:", model.generate_report(**batch))
"""
    done = processes.run_without_us(["-c", code])
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)
    assert f"reports: {reports}" in done.stdout


def test_made_from_settings(tmp_path):
    settings = own(branches=["visible", "kinematics"], sensor_layers=3, sensor_dropout=0.1)
    model, lines = make_trident(
        ModelSettings(tuning="full"), settings, Heads(NAMES), {**SHAPES, "kinematics": (9,)}, CPU
    )
    assert model.config.kinematics_channels == 9 and model.config.dropout == 0.1
    assert len(model.trident.branches["visible"].layers) == 3 and "infrared" not in model.trident.branches
    assert model.config.id2label == dict(enumerate(NAMES)) and "from scratch" in lines[0]


def test_made_in_the_dtype_that_was_asked_for(batch):
    model, _ = make_trident(ModelSettings(tuning="full", dtype="bfloat16"), own(), Heads(NAMES), SHAPES, CPU)
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert torch.isfinite(model(**batch).loss)


def test_a_model_reads_branches_that_all_recordings_lack():
    model = trident(branches=["visible", "infrared", "kinematics"])
    there = {"kinematics": SHAPES["kinematics"]}
    rows = [{name: row[name] for name in ("kinematics", "labels")} for row in rows_of(synthetic(3, 4, 0))]
    batch = SensorCollator(input_shapes(model.config, there))(rows)
    assert batch["branch_mask"].tolist() == [[name == "kinematics" for name in BRANCHES]] * 3
    full = SensorCollator(SHAPES)(rows)
    assert torch.equal(logits(model, batch), logits(model, full))  # how small the nothing is does not count


def test_the_run_of_an_adapter_tells_its_classes(tmp_path, batch):
    settings = saved(tmp_path / "base")
    model = tuned(settings)
    model.save_pretrained(tmp_path / "run" / "checkpoint-1")
    adapter = ModelSettings(model_name_or_path=str(tmp_path / "run" / "checkpoint-1"), tuning="lora")
    assert trained_label_names(adapter) is None and trained_label_names(settings) == NAMES
    require_same_classes(adapter, ["a", "b", "c", "d"])  # nobody knows
    names = ["d", "c", "b", "a"]
    (tmp_path / "run" / "training_config.json").write_text(json.dumps({"data": {"per_class": dict.fromkeys(names, 1)}}))
    assert trained_label_names(adapter) == names
    require_same_classes(adapter, names)
    with pytest.raises(ModelError, match=r"has a head for the classes d, c, b, a, but the recordings are of a, b, c"):
        require_same_classes(adapter, sorted(names))
    for content in ("{}", '{"data": [1]}', '{"data": {"per_class": null}}'):
        (tmp_path / "run" / "training_config.json").write_text(content)
        with pytest.raises(ModelError, match="does not name the classes"):
            require_same_classes(adapter, names)


@pytest.mark.parametrize("time", [5, 8])
def test_a_token_of_kinematics_counts_if_one_of_its_points_does(time):
    """Lengths that are no multiple of the patch included."""
    branch = trident(branches=["kinematics"]).trident.branches["kinematics"]
    mask = torch.arange(time)[None] < torch.tensor([[1], [time]])
    _, told = branch(torch.ones(2, time, 6), mask)
    assert told.dtype == torch.bool and told.tolist() == [[True, False], [True, True]]


def test_no_mask_is_padded_as_bool(batch, monkeypatch):
    """For that inductor writes C++ which does not compile, and torch_compile: true stops on a CPU."""
    padded, real = [], torch.nn.functional.pad
    monkeypatch.setattr("torch.nn.functional.pad", lambda x, *rest: padded.append(x.dtype) or real(x, *rest))
    logits(trident(), batch)
    assert padded and torch.bool not in padded


def test_a_model_gets_a_new_head_for_other_classes(tmp_path):
    stored = trident()
    stored.config.id2label = dict(enumerate(NAMES))
    stored.save_pretrained(tmp_path)
    settings = ModelSettings(model_name_or_path=str(tmp_path), tuning="full")
    same, lines = make_trident(settings, own(), Heads(NAMES), SHAPES, CPU)
    assert torch.equal(same.classifier.weight, stored.classifier.weight) and len(lines) == 1
    for names in (["a", "b", "c"], ["a", "b", "c", "d"]):
        other, lines = make_trident(settings, own(), Heads(names), SHAPES, CPU)
        assert other.classifier.weight.shape[0] == len(names) and "head is replaced" in lines[1]
        assert not torch.equal(other.classifier.weight[:3], stored.classifier.weight[:3])
        kept = other.trident.fusion.queries, stored.trident.fusion.queries
        assert torch.equal(*kept) and other.config.id2label[0] == "a"


def test_a_model_that_does_not_fit_is_refused(tmp_path):
    trident(branches=["visible"]).save_pretrained(tmp_path / "one")
    settings = ModelSettings(model_name_or_path=str(tmp_path / "one"), tuning="full")
    config = stored_config(settings)
    assert branches_of(config, own()) == ["visible"]
    with pytest.raises(ModelError, match="branches is infrared, but the model has visible"):
        branches_of(config, own(branches=["infrared"]))
    trident().save_pretrained(tmp_path / "all")
    settings = ModelSettings(model_name_or_path=str(tmp_path / "all"), tuning="full")
    with pytest.raises(ModelError, match="9 channels of kinematics, but the model takes 6"):
        make_trident(settings, own(), Heads(NAMES), {**SHAPES, "kinematics": (9,)}, CPU)
    with pytest.raises(ModelError, match="are not those of the recordings"):
        load_scored_trident(settings, own(), Heads(NAMES), SHAPES)
    config = json.loads((tmp_path / "all" / "config.json").read_text())
    (tmp_path / "all" / "config.json").write_text(json.dumps({**config, "num_fusion_layers": 2}))
    with pytest.raises(ModelError, match=r"lacks weights of a TRIDENT: trident.fusion.layers.1"):
        make_trident(settings, own(), Heads(NAMES), SHAPES, CPU)


def test_a_model_of_another_kind_is_refused(tmp_path):
    from tests.tiny import vit

    vit().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="is a vit model"):
        stored_config(ModelSettings(model_name_or_path=str(tmp_path)))


# -- adapters ----------------------------------------------------------------------------------------------------------


def saved(folder: Path, **changes) -> ModelSettings:
    model = trident(**changes)
    model.config.id2label = dict(enumerate(NAMES))
    model.save_pretrained(folder)
    return ModelSettings(model_name_or_path=str(folder), tuning="lora", lora_r=2)


def tuned(settings: ModelSettings):
    model, _ = make_trident(settings, own(), Heads(NAMES), SHAPES, CPU)
    torch.manual_seed(1)
    return prepare_for_tuning(model, settings, adapter_plan(model))


def trained(model, batch, steps: int = 3, learning_rate: float = 0.1) -> list[float]:
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], learning_rate)
    losses = []
    for _ in range(steps):
        loss = model.train()(**batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_adapters_lie_on_the_transformer_blocks_only(tmp_path, batch):
    model = tuned(saved(tmp_path))
    adapted = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert len(adapted) == 3 * 6 and all(".layers." in name for name in adapted)
    trains = {name for name, weight in model.named_parameters() if weight.requires_grad}
    assert all("lora_" in name or ".classifier.modules_to_save." in name for name in trains)
    assert any(".classifier.modules_to_save." in name for name in trains)
    losses = trained(model, batch)
    assert losses[-1] < losses[0]


def test_an_adapter_is_saved_with_its_head_and_scored(tmp_path, batch):
    settings = saved(tmp_path / "base")
    model = tuned(settings)
    trained(model, batch)
    model.save_pretrained(tmp_path / "adapter")
    assert any("classifier" in name for name in load_file(tmp_path / "adapter" / "adapter_model.safetensors"))
    again = load_scored_trident(
        ModelSettings(model_name_or_path=str(tmp_path / "adapter"), tuning="lora"), own(), Heads(NAMES), SHAPES
    )
    assert torch.equal(logits(again, batch), logits(model, batch))


def test_qlora_packs_the_linear_layers_of_the_blocks_only(tmp_path, batch):
    pytest.importorskip("bitsandbytes")
    settings = saved(tmp_path, hidden_size=32, intermediate_size=64)
    settings = ModelSettings(
        model_name_or_path=settings.model_name_or_path, tuning="qlora", lora_r=2, mixed_precision="no"
    )
    model, _ = make_trident(settings, own(), Heads(NAMES), SHAPES, CPU)
    packed = {name for name, _ in quantized_modules(model)}
    assert packed == {*model.transformer_linears()} and len(packed) == 3 * 6
    assert {weight.dtype for name, weight in model.named_parameters() if ".layers." not in name} == {torch.float32}
    adapted = prepare_for_tuning(model, settings, adapter_plan(model))
    losses = trained(adapted, batch, learning_rate=0.01)  # 0.1 rises or falls by how this CPU rounds
    assert losses[-1] < losses[0]


def test_qlora_packs_chosen_parts_only(tmp_path, batch):
    pytest.importorskip("bitsandbytes")
    base = saved(tmp_path, hidden_size=32, intermediate_size=64).model_name_or_path
    settings = ModelSettings(model_name_or_path=base, tuning="qlora", lora_r=2, mixed_precision="no")
    chosen = own(quantized_branches=["fusion", "kinematics"])
    model, _ = make_trident(settings, chosen, Heads(NAMES), SHAPES, CPU)
    packed = {name for name, _ in quantized_modules(model)}
    parts = ("trident.fusion.", "trident.branches.kinematics.")
    assert packed == {name for name in model.transformer_linears() if name.startswith(parts)} and len(packed) == 12
    adapted = prepare_for_tuning(model, settings, adapter_plan(model))
    adapted(**batch).loss.backward()
    gradients = {name: weight.grad for name, weight in adapted.named_parameters() if "lora_B" in name}
    assert len(gradients) == 18 and all(gradient.any() for name, gradient in gradients.items() if "key" not in name)


def test_everything_outside_of_transformer_blocks_is_named_once():
    """But for the learned queries and kinds of the fusion, which are no layers."""
    model = trident(branches=list(BRANCHES), **HEAD)
    parts = [dict(model.get_submodule(name).named_parameters(prefix=name)) for name in model.outside_blocks()]
    named = [name for part in parts for name in part]
    blocks = {name for name, _ in model.trident.named_parameters(prefix="trident") if ".layers." in name}
    rest = {"trident.fusion.queries", "trident.fusion.kinds"}
    assert len(named) == len({*named})
    assert {*named} == {name for name, _ in model.trident.named_parameters(prefix="trident")} - blocks - rest


def test_a_random_start_is_written_once_and_depends_on_the_seed(tmp_path):
    def start(seed: int) -> Path:
        torch.manual_seed(seed)
        return random_start(new_trident(ModelSettings(), own(), Heads(NAMES), SHAPES), seed, tmp_path)

    first, again, other = start(1), start(1), start(2)
    assert first.parent.name not in CACHE_KINDS  # nobody could make the adapters' base again who removes it
    assert first == again != other
    one, two = (load_file(folder / "model.safetensors") for folder in (first, other))
    assert one.keys() == two.keys() and not torch.equal(one["classifier.weight"], two["classifier.weight"])


def test_what_may_be_packed_is_what_gets_adapters():
    model = trident(hidden_size=32, intermediate_size=64)
    assert quantizable_layers(model) == model.transformer_linears()


# -- less memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("branches", [None, ("visible",), ("infrared", "fusion"), ("dual_vision", "plume", "geometry")])
def test_checkpointed_branches_give_the_same_gradients(batch, branches):
    plain, checkpointed = (trident(branches=list(BRANCHES)) for _ in range(2))
    checkpointed.checkpointed = branches
    parts = [*plain.trident.branches.items(), ("fusion", None)]
    expected = {"visible": 3, "infrared": 3, "kinematics": 1, "fusion": 1}
    expected |= {"dual_vision": 2, "plume": 3, "cooling": 1, "geometry": 2}
    wanted = [name for name, _ in parts if branches is None or name in branches]
    assert checkpoint_every_layer(checkpointed) == sum(expected[name] for name in wanted)
    for model in (plain, checkpointed):
        model.train()(**batch).loss.backward()
    pairs = zip(plain.parameters(), checkpointed.parameters(), strict=True)
    assert all(torch.equal(one.grad, two.grad) for one, two in pairs)


def test_a_checkpointed_branch_keeps_less(batch):
    def kept_bytes(branches) -> int:
        model, kept = trident(), {}
        model.checkpointed = branches
        if branches:
            checkpoint_every_layer(model)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.update({t.data_ptr(): t.nbytes}) or t, lambda t: t
        ):
            model.train()(**batch)
        return sum(kept.values())

    none, kinematics, both = (kept_bytes(branches) for branches in (None, ("kinematics",), ("kinematics", "visible")))
    assert both < 0.8 * kinematics < 0.8 * none


def test_offloaded_linear_layers_train_to_the_same_losses(tmp_path, batch):
    settings = saved(tmp_path / "base")

    def losses(folder, smallest: int):
        model, _ = make_trident(settings, own(), Heads(NAMES), SHAPES, CPU)
        moved = offload_linears(model, model.transformer_linears(), smallest, CPU, folder)
        torch.manual_seed(1)
        adapted = prepare_for_tuning(model, settings, adapter_plan(model))
        return moved, adapted, trained(adapted, batch)

    none, plain, expected = losses(None, 10**9)
    assert none.names == () and not has_offloaded_weights(plain)
    for folder, place in ((str(tmp_path / "disk"), "disk"), (None, "cpu")):
        moved, adapted, found = losses(folder, 16 * 32 * 4)
        assert moved.place == place and len(moved.names) == 3 * 2  # the two of each MLP
        assert all(name.endswith((".up", ".down")) for name in moved.names)
        assert has_offloaded_weights(adapted) and found == expected
        assert torch.equal(logits(adapted, batch), logits(plain, batch))
    del adapted


def test_the_folder_of_offloaded_layers_goes_with_the_model(tmp_path):
    model = trident()
    moved = offload_linears(model, model.transformer_linears(), 0, CPU, str(tmp_path))
    assert len([*tmp_path.glob("*/*/weight.dat")]) == len(moved.names) == 18
    assert "18 linear layers" in moved.line(checkpoints=True) and "on disk" in moved.line(True)
    assert "without checkpoint_every_layer" in moved.line(checkpoints=False)
    del model
    assert not [*tmp_path.glob("*/*")]


MEASURE = """
import ctypes, gc, sys, torch
from scu_trainer.hardware.heap import M_MMAP_THRESHOLD, M_TRIM_THRESHOLD
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.load import prepare_for_tuning
from scu_trainer.models.loading.offload_linears import offload_linears
from scu_trainer.models.sensors.loading import Heads, adapter_plan, make_trident
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.sensors import SensorSettings

for threshold, size_bytes in ((M_MMAP_THRESHOLD, 65536), (M_TRIM_THRESHOLD, 131072)):
    assert ctypes.CDLL(None).mallopt(threshold, size_bytes)  # freed weights go back to the system at once

def own_bytes():
    return 1024 * int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1])

def largest(base, folder):
    settings, cpu, seen = ModelSettings(model_name_or_path=base, tuning="lora"), torch.device("cpu"), []
    gc.collect()  # the model before: its checkpointed blocks and their forwards hold each other
    before = own_bytes()
    names, shapes = ["0", "1", "2", "3"], {"kinematics": (6,)}
    model, _ = make_trident(settings, SensorSettings(branches=["kinematics"]), Heads(names), shapes, cpu)
    if folder:
        offload_linears(model, model.transformer_linears(), 2**20, cpu, folder)
    model = prepare_for_tuning(model, settings, adapter_plan(model)).train()
    checkpoint_every_layer(model)
    for module in model.modules():
        module.register_forward_hook(lambda *_: seen.append(own_bytes()))
    for _ in range(2):
        model(kinematics=torch.ones(2, 8, 6), labels=torch.zeros(2, dtype=torch.int64)).loss.backward()
    return max(seen) - before

base, folder = sys.argv[1:]
largest(base, "")  # threads and the like are there from here on
print(largest(base, folder), largest(base, ""))
"""


def test_offloaded_to_disk_takes_less_memory_of_its_own(tmp_path):
    """Stored in half precision, so that loading cannot map the weights: then they would not be memory of its own."""
    model = trident(branches=["kinematics"], hidden_size=256, intermediate_size=2048, num_hidden_layers=6)
    names = {*model.transformer_linears()}
    large = [layer.weight.nbytes for name, layer in model.named_modules() if name in names]
    large_bytes = sum(size for size in large if size >= 2**20)
    model.half().save_pretrained(tmp_path / "base")
    done = processes.launch(["-c", MEASURE, tmp_path / "base", tmp_path / "disk"])
    assert done.returncode == 0, done.stderr
    offloaded_bytes, plain_bytes = map(int, done.stdout.split()[-2:])
    assert plain_bytes - offloaded_bytes > 0.6 * large_bytes


def test_sizes_that_tests_use_are_tiny():
    assert sum(weight.numel() for weight in trident().parameters()) < 20_000 and TINY["hidden_size"] == 16
