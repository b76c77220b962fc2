"""Image classifiers: what they see, how they are made and loaded, and the random changes in training."""

from __future__ import annotations

import copy
import functools
import json

import numpy
import PIL.Image
import pytest
import torch
from transformers import (
    ConvNextImageProcessorPil,
    DeiTConfig,
    DeiTForImageClassificationWithTeacher,
    EfficientNetImageProcessorPil,
    MobileViTImageProcessorPil,
    PvtConfig,
    PvtForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    ResNetModel,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from scu_trainer.data.images.decode import fixed_pixels
from scu_trainer.errors import ModelError
from scu_trainer.models.checkpointing import checkpoint_every_layer
from scu_trainer.models.loading.load import classes_of
from scu_trainer.models.vision.adapters import inner_targets
from scu_trainer.models.vision.inputs import PixelInputs, attach, augmentation, pixel_inputs, require_stock_pixels
from scu_trainer.models.vision.models import (
    attach_pixel_inputs,
    load_scored_classifier,
    make_classifier,
    training_augmentation,
)
from scu_trainer.models.vision.norms import allow_single_images, needs_several_rows
from scu_trainer.models.vision.view import usual_size, view_of
from scu_trainer.settings import ModelSettings
from scu_trainer.settings.images import ImageSettings
from tests import processes
from tests.tiny import lora

FULL = ModelSettings(tuning="full")
NAMES = ("cat", "dog", "fox")


def resnet_config(**changes) -> ResNetConfig:
    sizes = {"layer_type": "basic", "depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8}
    names = {"id2label": dict(enumerate(NAMES)), "label2id": {name: k for k, name in enumerate(NAMES)}}
    return ResNetConfig(**{**sizes, **names, **changes})


@pytest.fixture
def stored(tmp_path):
    """Folder of a tiny ResNet for three classes, without a processor."""
    torch.manual_seed(0)
    ResNetForImageClassification(resnet_config()).save_pretrained(tmp_path / "stored")
    return tmp_path / "stored"


def from_folder(folder, names=NAMES, own=None, size: int = 30, **changes):
    settings, own = ModelSettings(tuning="full", model_name_or_path=str(folder), **changes), own or ImageSettings()
    view = view_of(settings, own, lambda: size)
    return *make_classifier(settings, own, names, view), view


def test_a_family_whose_configuration_only_counts_its_classes(tmp_path):
    sizes = {"image_size": 32, "hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4}
    PvtForImageClassification(PvtConfig(**sizes, num_labels=5)).save_pretrained(tmp_path / "five")
    model, lines, _ = from_folder(tmp_path / "five")
    assert model.config.num_labels == 3 and "the head is replaced: 3 classes where the model has 5" in lines
    model.save_pretrained(tmp_path / "three")
    assert classes_of(PvtConfig.from_pretrained(tmp_path / "three")) == NAMES


# -- the processor -----------------------------------------------------------------------------------------------------


def test_sizes_are_rounded_up_to_usual_ones():
    assert [usual_size(side) for side in (8, 32, 33, 100, 224, 4000)] == [32, 32, 64, 128, 224, 224]


def test_view_from_scratch():
    view = view_of(FULL, ImageSettings(image_channels=1), lambda: 28)
    assert (view.channels, view.size, view.is_new) == (1, (32, 32), True)
    assert view_of(FULL, ImageSettings(image_size=48), lambda: 28).size == (48, 48)


def test_stored_processor_decides_what_images_look_like(stored):
    ConvNextImageProcessorPil(size={"shortest_edge": 40}, image_mean=[0.1, 0.2, 0.3]).save_pretrained(stored)
    _, _, view = from_folder(stored)
    assert view.size == (40, 40) and list(view.processor.image_mean) == [0.1, 0.2, 0.3] and not view.is_new
    assert from_folder(stored, own=ImageSettings(image_size=64))[2].size == (64, 64)


def test_processor_that_keeps_proportions_is_made_to_give_one_size(stored):
    ViTImageProcessorPil(size={"shortest_edge": 24}, do_resize=True).save_pretrained(stored)
    assert from_folder(stored)[2].size == (24, 24)


def test_model_without_a_processor_says_so(stored):
    _, lines, view = from_folder(stored)
    assert view.is_new and view.size == (32, 32) and any("has no preprocessor_config.json" in line for line in lines)


def test_other_channels_than_the_model_takes_are_refused(stored):
    with pytest.raises(ModelError, match=r"image_channels is 1, but .* takes 3"):
        from_folder(stored, own=ImageSettings(image_channels=1))


# -- the model ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["resnet18", "efficientnet_b0"])
def test_from_scratch_names_its_classes_and_passes_a_signal(name):
    own = ImageSettings(architecture=name)
    view = view_of(FULL, own, lambda: 8)
    torch.manual_seed(0)
    model, _ = make_classifier(FULL, own, NAMES, view)
    assert model.config.id2label == dict(enumerate(NAMES)) and needs_several_rows(model, view)
    model.train()
    logits = model(pixel_values=torch.randn(8, 3, *view.size)).logits
    assert logits.shape == (8, 3) and logits.std(dim=0).min() > 1e-3  # transformers' own EfficientNet: 1e-32


def test_convolutions_from_scratch_start_by_their_fan_out():
    own = ImageSettings(architecture="efficientnet_b0")
    model, _ = make_classifier(FULL, own, NAMES, view_of(FULL, own, lambda: 8))
    stem = model.efficientnet.embeddings.convolution.weight
    assert stem.std().item() == pytest.approx((2 / (stem.shape[0] * 9)) ** 0.5, rel=0.1)


@pytest.mark.parametrize("declared", [[], 0, [224, -1]])
def test_a_configuration_without_a_size_that_can_be_is_refused(tmp_path, declared):
    ViTConfig(image_size=declared).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"image_size is .* in the configuration of .*correct it there"):
        view_of(ModelSettings(model_name_or_path=str(tmp_path)), ImageSettings(), lambda: 32)


def test_sizes_of_architectures_are_those_of_their_papers():
    view = view_of(FULL, ImageSettings(), lambda: 224)
    names = [str(number) for number in range(1000)]
    with torch.device("meta"):
        models = {name: _unchecked(name, names, view) for name in ("resnet18", "resnet50", "resnet101")}
    millions = {name: round(sum(p.numel() for p in model.parameters()) / 1e6, 1) for name, model in models.items()}
    assert millions == {"resnet18": 11.7, "resnet50": 25.6, "resnet101": 44.5}


def _unchecked(name, names, view):
    from scu_trainer.models.vision.models import _from_scratch

    return _from_scratch(name, names, view)


def test_image_too_small_for_the_architecture():
    own = ImageSettings(image_size=16)
    with pytest.raises(ModelError, match=r"image_size 16 is too small for resnet18.*32 or more"):
        make_classifier(FULL, own, NAMES, view_of(FULL, own, lambda: 16))


def test_size_that_a_loaded_model_does_not_take(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4)).save_pretrained(tmp_path)
    assert from_folder(tmp_path)[2].size == (8, 8)
    with pytest.raises(ModelError, match=r"does not take images of 16 x 16.*image_size"):
        from_folder(tmp_path, own=ImageSettings(image_size=16))


def test_head_is_made_again_for_another_number_of_classes_only(stored):
    same, lines, _ = from_folder(stored)
    before = ResNetForImageClassification.from_pretrained(stored)
    assert torch.equal(same.classifier[1].weight, before.classifier[1].weight)
    assert not any("is replaced" in line for line in lines)
    other, lines, _ = from_folder(stored, names=("a", "b", "c", "d"))
    assert other.classifier[1].weight.shape[0] == 4 and other.config.id2label[3] == "d"
    assert any("4 classes where the model has 3" in line for line in lines)
    stem = "resnet.embedder.embedder.convolution.weight"
    assert torch.equal(other.state_dict()[stem], before.state_dict()[stem])


def test_classes_of_a_head_that_is_kept_are_named_where_they_are_others(stored):
    assert (
        "the head is kept, for the same number of classes: cat, dog, fox are now a, b, c"
        in from_folder(stored, names="abc")[1]
    )
    assert not any("the head" in line for line in from_folder(stored)[1])


def test_backbone_without_a_head(tmp_path):
    ResNetModel(resnet_config()).save_pretrained(tmp_path)
    model, lines, _ = from_folder(tmp_path)
    assert model.config.num_labels == 3 and any("is replaced" in line for line in lines)
    assert "the head is replaced: a new one for 3 classes" in lines


def test_classifier_that_only_predicts_is_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = DeiTConfig(**sizes, image_size=32, patch_size=8, num_labels=3)
    DeiTForImageClassificationWithTeacher(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"is a DeiTForImageClassificationWithTeacher, .* takes no labels"):
        from_folder(tmp_path)


def test_model_without_some_of_its_weights(stored):
    from safetensors.torch import load_file, save_file

    weights = load_file(stored / "model.safetensors")
    del weights["resnet.embedder.embedder.convolution.weight"]
    save_file(weights, stored / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"lacks weights.*embedder.convolution"):
        from_folder(stored)


def test_model_that_is_none(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        from_folder(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ModelError, match="image classifier"):
        from_folder(tmp_path)


def test_scored_model_must_know_the_classes_of_the_data(stored):
    settings = ModelSettings(tuning="full", model_name_or_path=str(stored))
    view = view_of(settings, ImageSettings(), lambda: 32)
    assert not load_scored_classifier(settings, NAMES, view).training
    with pytest.raises(ModelError, match=r"classes of .*cat, dog, fox.*dog, cat, fox"):
        load_scored_classifier(settings, ("dog", "cat", "fox"), view)


def test_adapters_sit_on_all_but_the_head(stored, tmp_path):
    model = from_folder(stored)[0]
    targets = inner_targets(model, ["classifier"])
    assert targets and not any(name.startswith("classifier") for name in targets)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    vit = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4))
    modules = dict(vit.named_modules())
    assert all(isinstance(modules[name], torch.nn.Linear) for name in inner_targets(vit, ["classifier"]))


def test_one_place_depends_on_the_size(stored):
    model, _, view = from_folder(stored, size=32)
    assert not needs_several_rows(model, view)
    assert needs_several_rows(model, view._replace(size=(8, 8)))


def test_one_image_is_normalised_by_running_statistics(stored):
    model = from_folder(stored)[0]
    small = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match="Expected more than 1 value"):
        model.train()(pixel_values=small[:1])
    stock = copy.deepcopy(model).train()(pixel_values=small).logits
    assert allow_single_images(model) > 1 and allow_single_images(copy.deepcopy(model)) == allow_single_images(model)
    torch.testing.assert_close(copy.deepcopy(model).train()(pixel_values=small).logits, stock)
    norms = [module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    before = [norm.running_mean.clone() for norm in norms]
    model.train()(pixel_values=small[:1], labels=torch.tensor([0])).loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    changed = [not torch.equal(norm.running_mean, mean) for norm, mean in zip(norms, before, strict=True)]
    assert any(changed) and not all(changed)


def test_architecture_beside_a_loaded_model_is_said_to_be_unused(stored):
    lines = from_folder(stored, own=ImageSettings(architecture="resnet50"))[1]
    assert any("architecture: resnet50 is not used" in line for line in lines)
    assert not any("is not used" in line for line in from_folder(stored)[1])


# -- the way from bytes to the model -----------------------------------------------------------------------------------


class Watched(torch.nn.Module):
    """Keeps what it gets."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, dtype=dtype))

    def forward(self, pixel_values, labels=None):
        self.pixels, self.labels = pixel_values, labels
        return pixel_values


def seen(changes=None, dtype=torch.float32) -> Watched:
    model = Watched(dtype)
    attach(model, PixelInputs([0.5, 0.4, 0.3], [0.1, 0.2, 0.3], changes))
    return model


def rows(count: int = 8, size: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_bytes_become_what_the_stock_processor_makes_of_them():
    processor = ViTImageProcessorPil(do_resize=False, image_mean=[0.5, 0.4, 0.3], image_std=[0.1, 0.2, 0.3])
    pixels = rows(1)
    wanted = processor(PIL.Image.fromarray(pixels[0].permute(1, 2, 0).numpy()), return_tensors="pt")["pixel_values"]
    for training in (True, False):
        torch.testing.assert_close(seen().train(training)(pixel_values=pixels), wanted)
    torch.testing.assert_close(seen()(pixels), wanted)


PROCESSORS = {
    "vit": ViTImageProcessorPil(size={"height": 20, "width": 20}),
    "twice": EfficientNetImageProcessorPil(size={"height": 20, "width": 20}),
    "offset": EfficientNetImageProcessorPil(size={"height": 64, "width": 64}, rescale_offset=True, include_top=False),
    "plain": ViTImageProcessorPil(size={"height": 20, "width": 20}, do_normalize=False, do_rescale=False),
    "cropped": ConvNextImageProcessorPil(size={"shortest_edge": 40}),
    "blue first": MobileViTImageProcessorPil(size={"shortest_edge": 24}, crop_size={"height": 20, "width": 20}),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_bytes_become_what_any_processor_makes_of_an_image(name):
    processor = PROCESSORS[name]
    bytes_of = functools.partial(fixed_pixels, processor=processor)
    require_stock_pixels(processor, 3, bytes_of)
    image = PIL.Image.fromarray(numpy.random.default_rng(1).integers(0, 256, (64, 64, 3), dtype=numpy.uint8))
    pixels = torch.from_numpy(bytes_of(image))[None]
    wanted = torch.from_numpy(numpy.array(processor(image)["pixel_values"][0], dtype=numpy.float32, order="C"))
    found = pixel_inputs(processor, 3).ready(pixels, False, torch.float32)[0]
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def test_processor_whose_values_cannot_be_repeated_is_refused():
    class Rooted(ViTImageProcessorPil):
        def normalize(self, image, *_, **__):
            return numpy.sqrt(image)

    processor = Rooted(size={"height": 20, "width": 20})
    with pytest.raises(ModelError, match="Rooted does more to pixels"):
        require_stock_pixels(processor, 3, functools.partial(fixed_pixels, processor=processor))
    blind = ViTImageProcessorPil(do_normalize=False, rescale_factor=0.0)
    with pytest.raises(ModelError, match="gives black and white the same values"):
        pixel_inputs(blind, 3)


def test_floats_pass_as_they_are():
    pixels = torch.rand(2, 3, 4, 4)
    assert seen(augmentation("standard", (4, 4))).train()(pixel_values=pixels) is pixels


def test_type_is_that_of_the_weights():
    assert seen(dtype=torch.bfloat16)(pixel_values=rows()).dtype == torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert seen(augmentation("light", (16, 16))).train()(pixel_values=rows()).dtype == torch.float32


@pytest.mark.parametrize("name", ["light", "standard", "strong"])
@pytest.mark.parametrize("size", [16, 96])
def test_changes_act_in_training_only_by_the_seed_and_leave_labels_alone(name, size):
    model, labels = seen(augmentation(name, (size, size))), torch.arange(4)
    plain = model.eval()(pixel_values=rows(4, size))
    assert torch.equal(plain, model(pixel_values=rows(4, size)))
    model.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(model(pixel_values=rows(4, size), labels=labels))
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2]) and not torch.equal(runs[0], plain)
    assert runs[0].shape == plain.shape and model.labels is labels and torch.equal(labels, torch.arange(4))


def test_each_row_is_changed_differently():
    torch.manual_seed(0)
    same = rows(1).expand(16, -1, -1, -1)
    for name in ("light", "standard"):
        changed = seen(augmentation(name, (16, 16))).train()(pixel_values=same)
        assert len({row.sum().item() for row in changed}) > 8


def test_light_changes_never_mirror():
    pixels = torch.zeros(200, 3, 16, 16, dtype=torch.uint8)
    pixels[..., :8] = 255
    torch.manual_seed(0)
    left, right = seen(augmentation("light", (16, 16))).train()(pixel_values=pixels).mean(dim=(1, 2)).split(8, dim=1)
    assert bool((left.mean(dim=1) > right.mean(dim=1)).all())
    left, right = seen(augmentation("standard", (16, 16))).train()(pixel_values=pixels).mean(dim=(1, 2)).split(8, dim=1)
    assert 0.3 < (left.mean(dim=1) > right.mean(dim=1)).float().mean() < 0.7


def test_pictures_are_the_same_under_autocast():
    model, pictures = seen(augmentation("light", (64, 64))).train(), []
    for enabled in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            pictures.append(model(pixel_values=rows(4, 64)))
    assert torch.equal(*pictures)


def test_no_changes_draw_no_random_numbers():
    before = torch.get_rng_state()
    seen(augmentation("none", (16, 16))).train()(pixel_values=rows())
    assert torch.equal(torch.get_rng_state(), before)


def test_strong_changes_of_gray_images_are_refused():
    own = ImageSettings(augmentation="strong", image_channels=1)
    with pytest.raises(ModelError, match="strong changes colours"):
        training_augmentation(own, view_of(FULL, own, lambda: 32))


def wrapped(kind: str, model):
    if kind == "lora":
        return lora(model)
    if kind == "compiled":
        return torch.compile(model, backend="eager")
    if kind == "copied":
        return copy.deepcopy(model)
    if kind == "checkpointed":
        assert checkpoint_every_layer(model)
    return model


@pytest.mark.parametrize("kind", ["plain", "lora", "compiled", "copied", "checkpointed"])
def test_bytes_reach_the_model_however_it_is_wrapped(stored, kind):
    model, _, view = from_folder(stored)
    attach_pixel_inputs(model, view.processor, augmentation("standard", view.size))
    model = wrapped(kind, model)
    model.train()
    model(pixel_values=rows(4, 32), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.eval()
    assert torch.equal(model(pixel_values=rows(4, 32)).logits, model(pixel_values=rows(4, 32)).logits)


def test_watching_twice_changes_pixels_once(stored):
    model, _, view = from_folder(stored)
    attach_pixel_inputs(model, view.processor)
    first = model.eval()(pixel_values=rows(2, 32)).logits
    attach_pixel_inputs(model, view.processor)
    assert torch.equal(model(pixel_values=rows(2, 32)).logits, first) and len(model._forward_pre_hooks) == 1


STOCK = """
import sys, torch, PIL.Image
from transformers import AutoImageProcessor, AutoModelForImageClassification
processor = AutoImageProcessor.from_pretrained(sys.argv[1], backend="pil")
model = AutoModelForImageClassification.from_pretrained(sys.argv[1]).eval()
with torch.no_grad():
    logits = model(**processor(PIL.Image.open(sys.argv[2]), return_tensors="pt")).logits
assert not [name for name in sys.modules if name.startswith("scu_trainer")]
print(logits[0].tolist(), model.config.id2label)
"""


def test_saved_model_gives_the_same_logits_in_a_fresh_process_with_stock_classes(stored, tmp_path):
    model, _, view = from_folder(stored)
    view.processor.image_mean, view.processor.image_std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    attach_pixel_inputs(model, view.processor, augmentation("standard", view.size))
    picture = PIL.Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (20, 27), dtype=numpy.uint8))  # gray
    picture.save(tmp_path / "picture.png")
    pixels = view.processor(picture, do_rescale=False, do_normalize=False)["pixel_values"][0]
    ours = model.eval()(pixel_values=torch.from_numpy(pixels)[None]).logits[0]
    for part in (model, view.processor):
        part.save_pretrained(tmp_path / "saved")
    done = processes.run_without_us(["-c", STOCK, tmp_path / "saved", tmp_path / "picture.png"])
    assert done.returncode == 0, done.stderr
    logits, names = done.stdout.strip().split("] ")
    torch.testing.assert_close(torch.tensor(json.loads(logits + "]")), ours, rtol=1e-5, atol=1e-6)
    assert names == str(dict(enumerate(NAMES)))
