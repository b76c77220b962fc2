"""Image classifiers in the loop: the task, its three loops, micro-batches, faults, and runs that are resumed."""

from __future__ import annotations

import io
import itertools
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy
import PIL.Image
import pytest
import torch
from peft import PeftModel
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from scu_trainer.data.images.data import find_images, prepare_images
from scu_trainer.data.images.store import PixelFormat, collate_images
from scu_trainer.errors import ModelError, SettingsError
from scu_trainer.models.vision.inputs import augmentation
from scu_trainer.models.vision.models import attach_pixel_inputs
from scu_trainer.models.vision.view import ImageView, view_of
from scu_trainer.settings import CurriculumSettings, DataSettings, MemorySettings, ModelSettings, RegularizationSettings
from scu_trainer.settings.images import ImageSettings
from scu_trainer.settings.tasks import KINDS, TaskSettings
from scu_trainer.train.job.components import EvaluationSource
from scu_trainer.train.job.job import Job
from scu_trainer.train.tasks.images import ImageTask
from scu_trainer.train.trainer import SCUTrainer
from tests.faults import fail_above_tokens, fail_in_backward
from tests.tiny import arguments, same, weights_of
from tests.train.stepwise import compared, error_of
from tests.train.test_resume import StopAt

SIZE = 16
BATCH = {"per_device_train_batch_size": 8, "data_collator": collate_images, "max_steps": 4}


def resnet(seed: int = 0) -> ResNetForImageClassification:
    torch.manual_seed(seed)
    sizes = {"layer_type": "basic", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8}
    return ResNetForImageClassification(ResNetConfig(**sizes, num_labels=10))


def vit(seed: int = 0) -> ViTForImageClassification:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **no_dropout, image_size=SIZE, patch_size=8, num_labels=10))


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    """(prepared samples, view) of 80 generated images."""
    cache = tmp_path_factory.mktemp("cache")
    data = DataSettings(dataset="generated", dataset_size=80, validation_split_percentage=20.0)
    source = find_images(data, ImageSettings(), cache)
    view: ImageView = view_of(ModelSettings(tuning="full"), ImageSettings(image_size=SIZE), lambda: SIZE)
    kind = PixelFormat(view.processor, view.channels, view.size)
    return prepare_images(source, kind, data, seed=0, cache_dir=cache), view


def watched(model, generated, changes: str = "none"):
    view = generated[1]
    attach_pixel_inputs(model, view.processor, augmentation(changes, view.size))
    return model


# -- micro-batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("accumulation", [1, 2])
def test_chunks_of_a_vit_give_the_gradient_of_the_whole(generated, tmp_path, accumulation):
    changes = {
        **BATCH,
        "dataset": generated[0].train,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": 0.1,
    }
    _, whole = compared(watched(vit(), generated), tmp_path / "a", **changes)
    _, cut = compared(watched(vit(), generated), tmp_path / "b", MemorySettings(max_batch_size=3), **changes)
    assert error_of(cut.gradients[0], whole.gradients[0]) < 1e-5
    assert error_of(cut.weights[-1], whole.weights[-1]) < 1e-5


def gradient_error(model, generated, rows_per_chunk: int, rows: int = 32) -> float:
    """Distance (2-norm) of the mean gradient of the micro-batches from that of the whole batch, relative to the
    latter."""
    batch = collate_images([generated[0].train[number] for number in range(rows)])

    def gradient(part) -> torch.Tensor:
        model.zero_grad()
        model.train()(**{name: value[part] for name, value in batch.items()}).loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    whole = gradient(slice(None))
    parts = [gradient(slice(start, start + rows_per_chunk)) for start in range(0, rows, rows_per_chunk)]
    return float((torch.stack(parts).mean(dim=0) - whole).norm() / whole.norm())


def test_what_chunks_change_with_batch_norm(generated):
    """docs state this: halves of a batch are nearer to it than eighths, and none is the whole."""
    errors = {rows: gradient_error(watched(resnet(), generated), generated, rows) for rows in (16, 8, 4)}
    assert 0.01 < errors[16] < errors[8] < errors[4] < 1.5, errors
    assert gradient_error(watched(vit(), generated), generated, 4) < 1e-5
    assert gradient_error(watched(resnet(), generated), generated, 32) == 0.0


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [resnet, vit])
def test_step_runs_again_with_the_same_pictures_after_out_of_memory(generated, tmp_path, make):
    """In micro-batches of the same rows the fault leaves no trace: random changes, dropout and statistics of
    BatchNorm."""
    batches = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    changes = {**BATCH, **batches, "dataset": generated[0].train, "memory": MemorySettings(min_batch_size=4)}
    plain, _ = compared(watched(make(), generated, "strong"), tmp_path / "a", **changes)
    model = watched(make(), generated, "strong")
    with fail_in_backward(next(model.parameters()), call=3) as counter:
        faulty, _ = compared(model, tmp_path / "b", **changes)
    assert counter.calls == 2 * 4 + 2 and same(faulty.model.state_dict(), plain.model.state_dict())


def test_resnet_goes_on_in_chunks_where_a_batch_does_not_fit(generated, tmp_path, caplog):
    model = watched(resnet(), generated, "light")
    with caplog.at_level(logging.WARNING, "scu_trainer"), fail_above_tokens(model, 4) as tried:
        trainer, _ = compared(model, tmp_path, MemorySettings(min_batch_size=2), dataset=generated[0].train, **BATCH)
    training = tried[tried.index(8) :]  # before, single rows are asked how their losses add up, in evaluation mode
    assert trainer.state.global_step == 4 and training[:3] == [8, 8, 4] and min(training) >= 2
    warnings = [record.getMessage() for record in caplog.records if "BatchNorm" in record.getMessage()]
    assert warnings and "min_batch_size" in warnings[0]
    counted = int(model.resnet.embedder.embedder.normalization.num_batches_tracked)
    assert counted == sum(rows <= 4 for rows in training)  # micro-batches that failed count nothing


# -- the loops ---------------------------------------------------------------------------------------------------------


def test_losses_of_rows_are_read_and_noise_guard_runs(generated, tmp_path):
    trainer = SCUTrainer(
        watched(resnet(), generated, "light"),
        arguments(tmp_path, max_steps=-1, num_train_epochs=3, per_device_train_batch_size=8),
        train_dataset=generated[0].train,
        data_collator=collate_images,
        curriculum=CurriculumSettings("noise_guard"),
        memory=MemorySettings(),
    )
    trainer.train()
    assert trainer.difficulty.observations.min() >= 1 and numpy.isfinite(trainer.difficulty.scores).all()
    assert trainer.curriculum.figures()["curriculum"]


def test_penalty_acts_on_a_classifier(generated, tmp_path):
    def distance(regularization) -> float:
        start = weights_of(resnet())
        trainer = SCUTrainer(
            watched(resnet(), generated, "light"),
            arguments(tmp_path, max_steps=12, per_device_train_batch_size=8),
            train_dataset=generated[0].train,
            data_collator=collate_images,
            regularization=regularization,
            regularization_tokens=len(generated[0].train),
        )
        trainer.train()
        return sum(float((w - start[name]).square().sum()) for name, w in weights_of(trainer.model).items())

    held, free = distance(RegularizationSettings(target_s=0.2, sigma=0.3)), distance(None)
    assert held < 0.8 * free


def test_resumed_run_with_random_changes_is_the_uninterrupted_one(generated, tmp_path):
    def run(folder, callbacks=(), resume=None):
        trainer = SCUTrainer(
            watched(resnet(), generated, "strong"),
            arguments(folder, max_steps=6, per_device_train_batch_size=8, lr_scheduler_type="linear"),
            train_dataset=generated[0].train,
            data_collator=collate_images,
            memory=MemorySettings(),
            curriculum=CurriculumSettings(),
            callbacks=list(callbacks),
        )
        trainer.train(resume_from_checkpoint=resume)
        return trainer.model.state_dict()

    whole = run(tmp_path / "a")
    run(tmp_path / "b", [StopAt(3)])
    assert same(run(tmp_path / "b", resume=str(tmp_path / "b" / "checkpoint-3")), whole)


# -- the task ----------------------------------------------------------------------------------------------------------


def job(tmp_path: Path, own: ImageSettings | None = None, model: ModelSettings | None = None, **changes) -> Job:
    data = {"dataset": "generated", "dataset_size": 40, "validation_split_percentage": 20.0}
    data |= {name: changes.pop(name) for name in list(changes) if name in DataSettings.__dataclass_fields__}
    return Job(
        model or ModelSettings(tuning="full"),
        DataSettings(**{**data, "cache_dir": str(tmp_path / "cache")}),
        None,
        arguments(tmp_path / "run", **{"per_device_train_batch_size": 8, **changes}),
        MemorySettings(min_batch_size=2),
        task=TaskSettings(task="image-classification"),
        kind=ImageTask(),
        own=own or ImageSettings(),
    )


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    resnet().save_pretrained(folder)
    return folder


def loaded(job: Job):
    shown = io.StringIO()
    parts = ImageTask().load(job, Console(file=shown, width=200))
    return parts, shown.getvalue()


def trained(job: Job, parts) -> SCUTrainer:
    task = ImageTask()
    trainer = SCUTrainer(
        parts.model,
        job.training,
        train_dataset=parts.data.train,
        eval_dataset=parts.data.eval,
        data_collator=parts.collator,
        processing_class=parts.processor,
        compute_metrics=task.compute_metrics,
        preprocess_logits_for_metrics=task.preprocess_logits,
        memory=job.memory,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("tuning", ["full", "lora"])
def test_a_run_can_be_scored_from_its_folder(tmp_path, stored, tuning):
    settings = ModelSettings(tuning=tuning, model_name_or_path=str(stored))
    task = job(tmp_path, model=settings, max_steps=10, learning_rate=3e-3)
    parts, shown = loaded(task)
    assert "images: 40 read, 32 for training, 8 held out" in shown and "model: " in shown
    trainer = trained(task, parts)
    expected = ImageTask().score(trainer.model, parts)
    measured = trainer.evaluate()
    assert measured["eval_accuracy"] == pytest.approx(float(expected.correct.mean()))
    trainer.save_model(tmp_path / "saved")
    scored = ModelSettings(tuning=tuning, model_name_or_path=str(tmp_path / "saved"))
    again = ImageTask().load_scored(EvaluationSource(scored, task.data, task.own, task.training.seed))
    assert list(again.processor.image_mean) == list(parts.processor.image_mean)
    assert again.data.fingerprint == parts.data.fingerprint
    numpy.testing.assert_allclose(ImageTask().score(again.model, again).nats, expected.nats, rtol=1e-4, atol=1e-5)


def test_model_keeps_the_numbers_of_its_classes(tmp_path):
    """Where the data have the same in another order, its head would be right about none of them."""
    model, data = resnet(), job(tmp_path).data
    names = find_images(data, ImageSettings(), tmp_path).label_names[::-1]
    model.config.id2label, model.config.label2id = dict(enumerate(names)), {name: k for k, name in enumerate(names)}
    model.save_pretrained(tmp_path / "reversed")
    parts, shown = loaded(job(tmp_path, model=ModelSettings(tuning="full", model_name_or_path=f"{tmp_path}/reversed")))
    assert tuple(parts.data.label_names) == names and "the head" not in shown
    usual, reversed_ = (numbers_by_image(found.data) for found in (loaded(job(tmp_path))[0], parts))
    assert len(usual) == 40 and reversed_ == {place: 9 - number for place, number in usual.items()}


def numbers_by_image(data) -> dict[str, int]:
    pairs = (zip(rows.keys(), rows.labels.tolist(), strict=True) for rows in (data.train, data.eval))
    return dict(itertools.chain(*pairs))


def test_processor_has_the_statistics_of_the_training_images(tmp_path, stored):
    parts, _ = loaded(job(tmp_path, model=ModelSettings(tuning="full", model_name_or_path=str(stored))))
    pixels = parts.collator([parts.data.train[k] for k in range(32)])["pixel_values"]
    seen = []
    parts.model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["pixel_values"]), with_kwargs=True)
    parts.model.eval()(pixel_values=pixels)
    assert seen[0].mean().abs() < 1e-3 and abs(float(seen[0].std()) - 1) < 1e-2


def test_probe_is_two_images(tmp_path, stored):
    parts, _ = loaded(job(tmp_path, model=ModelSettings(tuning="full", model_name_or_path=str(stored))))
    assert ImageTask().example_inputs(parts)["pixel_values"].shape == (2, 3, 32, 32)


def test_batches_must_not_all_be_one_image_where_batch_norm_has_one_place(tmp_path):
    with pytest.raises(SettingsError, match=r"batch_size is 1, .*2 or more, or image_size to 64"):
        loaded(job(tmp_path, per_device_train_batch_size=1))


def test_run_goes_on_where_an_epoch_ends_with_one_image(tmp_path):
    """32 images in batches of 31; a curriculum that leaves images out ends epochs at any number."""
    parts, _ = loaded(job(tmp_path, per_device_train_batch_size=31, max_steps=2))
    assert trained(job(tmp_path, per_device_train_batch_size=31, max_steps=2), parts).state.global_step == 2


@pytest.mark.parametrize(("rows", "typed", "expected"), [(8, 1, 4), (2, 1, 2), (8, 3, 3)])
def test_chunks_for_batch_norm_are_no_smaller_than_need_be(tmp_path, stored, rows, typed, expected):
    settings = ModelSettings(tuning="full", model_name_or_path=str(stored))
    task = job(tmp_path, model=settings, per_device_train_batch_size=rows)
    task.memory = MemorySettings(min_batch_size=typed)
    _, shown = loaded(task)
    assert task.memory.min_batch_size == expected
    assert (f"min_batch_size: {expected}, because BatchNorm" in shown) == (typed == 1)


def test_chunks_of_models_without_batch_norm_may_be_one_image(tmp_path):
    vit().save_pretrained(tmp_path / "vit")
    task = job(tmp_path, model=ModelSettings(tuning="full", model_name_or_path=str(tmp_path / "vit")))
    task.memory = MemorySettings()
    loaded(task)
    assert task.memory.min_batch_size == 1


def test_models_from_scratch_are_not_pulled_to_their_start():
    assert TaskSettings(task="image-classification").defaults["scu"] is False


def test_no_preset_accumulates():
    """Over accumulated batches a model that ignores num_items_in_batch has a loss that is too large."""
    presets = KINDS["image-classification"].presets
    assert all(preset.get("gradient_accumulation_steps", 1) == 1 for preset in presets.values())
    assert presets["memory_efficient"]["per_device_train_batch_size"] == 32


def test_strong_changes_of_gray_images_are_refused_at_once(tmp_path):
    with pytest.raises(SettingsError, match=r"strong changes colours.*image_channels"):
        ImageTask().check(job(tmp_path, ImageSettings(augmentation="strong", image_channels=1)))


@pytest.mark.parametrize("curriculum", ["token_budget", "length_warmup", "noise_guard+token_budget"])
def test_curricula_of_lengths_are_refused(tmp_path, curriculum):
    task = job(tmp_path)
    task.curriculum = CurriculumSettings(curriculum)
    with pytest.raises(SettingsError, match="acts on the lengths of rows, but all images have the same size"):
        ImageTask().check(task)


# -- adapters ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapter(tmp_path_factory, stored) -> Path:
    """Saved by a LoRA run on the ten classes of generated images."""
    folder = tmp_path_factory.mktemp("adapter")
    task = job(folder, model=ModelSettings(tuning="lora", model_name_or_path=str(stored)), max_steps=2)
    trained(task, loaded(task)[0]).save_model(folder / "saved")
    return folder / "saved"


def scored(adapter: Path, tmp_path: Path, **changes):
    task = job(tmp_path, **changes)
    settings = ModelSettings(tuning="lora", model_name_or_path=str(adapter))
    return ImageTask().load_scored(EvaluationSource(settings, task.data, task.own, task.training.seed))


def test_adapter_knows_its_classes(adapter, tmp_path):
    with pytest.raises(ModelError, match=r"classes of .*hue 0, .* are not those of the data \(0, 1, 2"):
        scored(adapter, tmp_path, dataset="digits")
    resumed_job = job(tmp_path, model=ModelSettings(tuning="lora", model_name_or_path=str(adapter)), dataset="digits")
    with pytest.raises(ModelError, match=r"classes of .* are not those of the data"):
        loaded(resumed_job)
    resumed_job.data = replace(resumed_job.data, dataset="generated")
    assert "made again" not in loaded(resumed_job)[1]


def test_adapter_that_does_not_tell_its_classes_is_refused(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "bare")
    (tmp_path / "bare" / "config.json").unlink()
    with pytest.raises(ModelError, match=r"does not name its classes; save .*config.json"):
        scored(tmp_path / "bare", tmp_path)


def test_adapter_can_be_used_with_stock_classes(adapter, stored, tmp_path):
    parts = scored(adapter, tmp_path)
    config = AutoConfig.from_pretrained(adapter)
    base = AutoModelForImageClassification.from_pretrained(stored, config=config, ignore_mismatched_sizes=True)
    model = PeftModel.from_pretrained(base, adapter).eval()
    pixels = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(model(pixel_values=pixels).logits, parts.model(pixel_values=pixels).logits)
    assert config.id2label[3] == "hue 108"


def test_model_is_scored_on_data_that_lack_a_class(stored, tmp_path):
    task = job(tmp_path, model=ModelSettings(tuning="full", model_name_or_path=str(stored)), max_steps=1)
    trained(task, loaded(task)[0]).save_model(tmp_path / "saved")
    for name in ("hue 36", "hue 252"):
        folder = tmp_path / "some" / name
        folder.mkdir(parents=True)
        for k in range(4):
            PIL.Image.new("RGB", (32, 32), (k, len(name), 0)).save(folder / f"{k}.png")
    parts = scored(tmp_path / "saved", tmp_path, dataset=str(tmp_path / "some"), dataset_size=None)
    assert set(parts.data.train.labels.tolist()) == {1, 7}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (ModelSettings(tuning="qlora"), "tuning: qlora"),
        (ModelSettings(tuning="lora"), "resnet18 starts from scratch"),
        (ModelSettings(tuning="full", device_map="auto"), "device_map"),
    ],
)
def test_settings_that_make_no_sense_for_images(tmp_path, model, message):
    with pytest.raises(SettingsError, match=message):
        ImageTask().check(job(tmp_path, model=model))


def test_a_size_that_is_too_small_is_refused_before_images_are_decoded(tmp_path):
    with pytest.raises(ModelError, match="image_size 16 is too small for resnet18"):
        ImageTask().check(job(tmp_path, own=ImageSettings(image_size=16)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 4}, "image_size is 4"),
        ({"image_channels": 2}, "image_channels is 2"),
        ({"augmentation": "lite"}, "did you mean 'light'"),
        ({"architecture": "resnet19"}, "did you mean 'resnet18'"),
    ],
)
def test_values_that_are_refused(changes, message):
    with pytest.raises(SettingsError, match=message):
        ImageSettings(**changes)
