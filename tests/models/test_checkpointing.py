from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    BertForMaskedLM,
    EfficientNetConfig,
    EfficientNetForImageClassification,
    GraniteMoeHybridForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
)
from transformers.modeling_layers import GradientCheckpointingLayer

from scu_trainer.errors import ModelError
from scu_trainer.models.checkpointing import PreservedStatistics, checkpoint_every_layer
from scu_trainer.models.embedded import base_config
from scu_trainer.settings import CurriculumSettings, MemorySettings, RegularizationSettings
from tests import tiny
from tests.faults import is_training, oom
from tests.train.stepwise import compared, error_of, record_micro_batches, replay_micro_batches

# -- models ------------------------------------------------------------------------------------------------------------


def seeded(make: Callable[..., nn.Module], *args, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return make(*args, **kwargs)


def resnet(layer_type: str = "basic", depths=(2, 2, 2, 2)) -> nn.Module:
    sizes = [8, 16, 16, 16] if layer_type == "basic" else [16, 32, 32, 32]
    config = ResNetConfig(
        embedding_size=8, num_labels=3, layer_type=layer_type, depths=list(depths), hidden_sizes=sizes[: len(depths)]
    )
    return seeded(ResNetForImageClassification, config)


def efficientnet() -> nn.Module:
    sizes = {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320}
    config = EfficientNetConfig(num_labels=3, drop_connect_rate=0.3, dropout_rate=0.3, **sizes)
    return seeded(EfficientNetForImageClassification, config)


def videomae() -> nn.Module:
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    clip = {"image_size": 16, "patch_size": 4, "num_frames": 4, "tubelet_size": 2, "num_labels": 3}
    return seeded(VideoMAEForVideoClassification, VideoMAEConfig(attention_probs_dropout_prob=0.2, **sizes, **clip))


def t5() -> nn.Module:
    model = tiny.t5()
    config = copy.deepcopy(model.config)
    config.num_layers = config.num_decoder_layers = 2
    config.dropout_rate, config.use_cache = 0.2, False
    return seeded(type(model), config)


def granite_experts() -> nn.Module:
    config = base_config(tiny.VOCAB, bos=0, eos=1, pad=2)
    config.num_local_experts, config.num_experts_per_tok, config.output_router_logits = 4, 2, True
    return seeded(GraniteMoeHybridForCausalLM, config)


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    norm = nn.BatchNorm3d(outputs, momentum=None if outputs == 8 else 0.1)
    return [nn.Conv3d(inputs, outputs, 3, padding=1), norm, nn.ReLU(), nn.Dropout(0.1), nn.MaxPool3d(2)]


STAGES = ((3, 4), (4, 8), (8, 16))


class Clips(nn.Module):
    """A classifier of short films: three convolutions in one list of layers, or in a list of lists."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        stages = [convolution(*channels) for channels in STAGES]
        flat = [module for stage in stages for module in stage]
        self.trunk = nn.Sequential(*(nn.Sequential(*stage) for stage in stages)) if nested else nn.Sequential(*flat)
        self.head = nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 3))

    def forward(self, pixel_values, labels):
        return {"loss": nn.functional.cross_entropy(self.head(self.trunk(pixel_values)), labels)}


class Translator(nn.Module):
    """torch's own encoder and decoder with cross-attention."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"d_model": 32, "nhead": 4, "dim_feedforward": 64, "dropout": 0.2, "batch_first": True}
        self.embed = nn.Embedding(tiny.VOCAB, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 2)
        self.head = nn.Linear(32, tiny.VOCAB)

    def forward(self, input_ids, labels):
        memory = self.encoder(self.embed(input_ids))
        causal = nn.Transformer.generate_square_subsequent_mask(labels.shape[1])
        hidden = self.decoder(self.embed(labels), memory=memory, tgt_mask=causal, tgt_is_causal=True)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def tokens(rows: int = 4, length: int = 32) -> dict[str, torch.Tensor]:
    return tiny.pad([tiny.Rows(rows, length)[i] for i in range(rows)])


def pixels(*shape: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = torch.rand(*shape, generator=generator)
    return {"pixel_values": values, "labels": torch.arange(shape[0]) % 3}


def plain_tokens() -> dict[str, torch.Tensor]:
    batch = tokens()
    batch.pop("attention_mask")
    return batch


DROPPING = {"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.2}


@dataclass(frozen=True)
class Family:
    """``blocks``: how many are checkpointed. ``kept``: at most this share of the bytes for backward stays.

    ``rounding``: 0 where the gradients are equal bit for bit, else a bound on the relative difference of any gradient.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    blocks: int
    kept: float
    rounding: float = field(default=0.0, kw_only=True)


FAMILIES = {
    "llama": Family(lambda: tiny.llama(attention_dropout=0.3), tokens, 2, 0.2),
    "llama, lora": Family(lambda: tiny.lora(tiny.llama(), lora_dropout=0.3), tokens, 2, 0.2),
    # Not 0: the unchecked run keeps a cache, which lays keys and states out in another order
    "gpt2": Family(lambda: tiny.gpt2(n_layer=2, resid_pdrop=0.2, attn_pdrop=0.2), tokens, 2, 0.2, rounding=1e-6),
    "granite hybrid": Family(tiny.granite_hybrid, tokens, 4, 0.1, rounding=1e-6),
    "granite hybrid, lora": Family(lambda: tiny.lora(tiny.granite_hybrid()), tokens, 4, 0.1, rounding=1e-6),
    "granite hybrid, experts": Family(granite_experts, tokens, 4, 0.1, rounding=1e-6),
    "bert": Family(lambda: tiny.bert(BertForMaskedLM, num_hidden_layers=2, **DROPPING), tokens, 2, 0.4),
    "vit": Family(tiny.vit, lambda: pixels(4, 3, 8, 8), 1, 0.4),
    "videomae": Family(videomae, lambda: pixels(2, 4, 3, 16, 16), 2, 0.3),
    # Not 0 with more layers: its position bias asks for a gradient when checkpointed, and so takes another kernel
    "t5": Family(t5, tokens, 4, 0.2, rounding=1e-6),
    "bart": Family(lambda: tiny.bart(dropout=0.2, encoder_layers=2, decoder_layers=2), tokens, 4, 0.4),
    "resnet-18": Family(resnet, lambda: pixels(4, 3, 32, 32), 8, 0.7),
    "resnet-50": Family(lambda: resnet("bottleneck", (3, 4, 6, 3)), lambda: pixels(4, 3, 32, 32), 16, 0.6),
    "efficientnet": Family(efficientnet, lambda: pixels(4, 3, 32, 32), 8, 0.3),
    "3D CNN, one list": Family(lambda: seeded(Clips, False), lambda: pixels(2, 3, 16, 16, 16), 3, 0.3),
    "3D CNN, list of lists": Family(lambda: seeded(Clips, True), lambda: pixels(2, 3, 16, 16, 16), 3, 0.3),
    "encoder and decoder": Family(lambda: seeded(Translator), plain_tokens, 4, 0.2),
}

# -- measuring ---------------------------------------------------------------------------------------------------------


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd keeps for backward, weights aside."""

    def __init__(self, model: nn.Module) -> None:
        self.bytes = 0
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self._alive: list[torch.Tensor] = []  # a freed storage's address would be another's
        super().__init__(self._count, lambda tensor: tensor)

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self._alive.append(tensor)
            self.bytes += storage.nbytes()
        return tensor


def step(model: nn.Module, batch: dict[str, Any]) -> tuple[int, dict[str, torch.Tensor]]:
    """(bytes kept for backward, gradients) of one forward and backward with dropout."""
    model.train().zero_grad()
    torch.manual_seed(5)
    with (saved := SavedBytes(model)):
        loss = model(**batch)["loss"]
    loss.backward()
    return saved.bytes, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


# -- exact, and smaller ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_same_gradients_and_statistics_from_fewer_bytes(name):
    family = FAMILIES[name]
    plain, checkpointed, batch = family.make(), family.make(), family.batch()
    names = list(checkpointed.state_dict())
    assert checkpoint_every_layer(checkpointed) == family.blocks
    assert checkpoint_every_layer(checkpointed) == family.blocks
    assert list(checkpointed.state_dict()) == names
    for _ in range(2):
        kept_plain, expected = step(plain, batch)
        kept, found = step(checkpointed, batch)
        assert error_of(found, expected) <= family.rounding
        assert tiny.same(buffers(checkpointed), buffers(plain))
    assert kept <= family.kept * kept_plain, f"{kept} of {kept_plain} bytes are kept"


@pytest.mark.parametrize("name", ["gpt2", "granite hybrid", "granite hybrid, experts"])
def test_bit_for_bit_where_the_unchecked_run_keeps_no_cache_either(name):
    plain, checkpointed = FAMILIES[name].make(), FAMILIES[name].make()
    plain.config.use_cache = False
    checkpoint_every_layer(checkpointed)
    assert tiny.same(step(checkpointed, tokens())[1], step(plain, tokens())[1])


def test_without_gradients_and_in_evaluation_nothing_changes():
    model = resnet()
    checkpoint_every_layer(model)
    expected, batch = resnet().eval(), pixels(4, 3, 32, 32)
    assert torch.equal(model.eval()(**batch)["loss"], expected(**batch)["loss"])
    with (saved := SavedBytes(model)):
        model(**batch)
    with (wanted := SavedBytes(expected)):
        expected(**batch)
    assert saved.bytes == wanted.bytes > 0
    model.train(), expected.train()
    with torch.no_grad():
        assert torch.equal(model(**batch)["loss"], expected(**batch)["loss"])
    assert tiny.same(buffers(model), buffers(expected))


def test_no_cache_is_kept_and_frozen_embeddings_ask_for_no_gradient():
    model = tiny.lora(tiny.llama())
    checkpoint_every_layer(model)
    output = model.train()(**tokens())
    assert output.past_key_values is None and not model.config.use_cache
    assert not model.get_input_embeddings()(tokens()["input_ids"]).requires_grad


def test_every_part_of_an_encoder_decoder_goes_without_cache():
    model = tiny.t5()
    checkpoint_every_layer(model)
    assert not any(part.config.use_cache for part in (model, model.encoder, model.decoder))


@pytest.mark.parametrize("name", ["resnet-18", "3D CNN, one list"])
def test_a_second_call_wraps_nothing_again(name):
    model = FAMILIES[name].make()
    checkpoint_every_layer(model)
    before = [vars(module).get("forward") for module in model.modules()]
    checkpoint_every_layer(model)
    assert any(before)
    assert all(old is vars(module).get("forward") for old, module in zip(before, model.modules(), strict=True))


def test_embeddings_that_were_asked_for_gradients_keep_them():
    model = tiny.llama()
    model.requires_grad_(False).enable_input_require_grads()
    checkpoint_every_layer(model)
    assert model.get_input_embeddings()(tokens()["input_ids"]).requires_grad


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@pytest.mark.parametrize("name", ["llama, lora", "resnet-18", "3D CNN, one list"])
def test_a_copy_is_a_model_of_its_own(name, duplicate):
    family = FAMILIES[name]
    model, batch = family.make(), family.batch()
    checkpoint_every_layer(model)
    twin, untouched = duplicate(model), {**tiny.weights_of(model), **buffers(model)}
    kept, gradients = step(twin, batch)
    assert tiny.same({**tiny.weights_of(model), **buffers(model)}, untouched)
    assert all(p.grad is None for p in model.parameters())
    assert (kept, True) == (step(model, batch)[0], tiny.same(gradients, step(family.make(), batch)[1]))


def test_saved_weights_load_into_a_model_without_it(tmp_path):
    model = resnet()
    checkpoint_every_layer(model)
    model.save_pretrained(tmp_path)
    assert tiny.same(dict(ResNetForImageClassification.from_pretrained(tmp_path).state_dict()), model.state_dict())


# -- statistics --------------------------------------------------------------------------------------------------------


def test_statistics_are_counted_twice_without_care(monkeypatch):
    """What the tests above would see, were the second run not told apart."""
    monkeypatch.setattr(PreservedStatistics, "__enter__", lambda self: self._kept.append([]))
    plain, checkpointed, batch = resnet(), resnet(), pixels(4, 3, 32, 32)
    checkpoint_every_layer(checkpointed)
    step(plain, batch), step(checkpointed, batch)
    assert not tiny.same(buffers(checkpointed), buffers(plain))


def test_an_error_while_computing_again_leaves_the_statistics_in_place():
    model, batch = resnet(), pixels(4, 3, 32, 32)
    checkpoint_every_layer(model)
    before = {name: id(buffer) for name, buffer in model.named_buffers()}
    layer = model.resnet.encoder.stages[0].layers[0].layer[1]
    loss = model.train()(**batch)["loss"]
    counted = buffers(model)
    handle = layer.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(oom()))
    with pytest.raises(torch.OutOfMemoryError):
        loss.backward()
    handle.remove()
    assert {name: id(buffer) for name, buffer in model.named_buffers()} == before
    assert tiny.same(buffers(model), counted)


def test_a_second_backward_through_the_same_graph():
    plain, checkpointed, batch = resnet(), resnet(), pixels(4, 3, 32, 32)
    checkpoint_every_layer(checkpointed)
    for model in (plain, checkpointed):
        loss = model.train()(**batch)["loss"]
        loss.backward(retain_graph=True)
        loss.backward()
    assert tiny.same(buffers(checkpointed), buffers(plain))
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), checkpointed.parameters(), strict=True))


class NormedLayer(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, hidden):
        return self.norm(self.linear(hidden)).relu()


class NormedConfig(PreTrainedConfig):
    model_type = "normed"


class NormedModel(PreTrainedModel):
    """A model that checkpoints its own layers, with BatchNorm in them."""

    config_class = NormedConfig
    supports_gradient_checkpointing = True
    main_input_name = "values"

    def __init__(self, config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(NormedLayer() for _ in range(3))
        self.post_init()

    def forward(self, values):
        for layer in self.layers:
            values = layer(values)
        return {"loss": values.square().mean()}


def test_statistics_in_layers_that_the_library_checkpoints():
    plain, checkpointed = (seeded(NormedModel, NormedConfig()) for _ in range(2))
    assert checkpoint_every_layer(checkpointed) == 3
    batch = {"values": torch.rand(4, 8, generator=torch.Generator().manual_seed(0))}
    for model in (plain, checkpointed, twin := copy.deepcopy(checkpointed)):
        gradients = step(model, batch)[1]
        assert tiny.same(gradients, step(model, batch)[1])
    assert tiny.same(buffers(checkpointed), buffers(plain)) and tiny.same(buffers(twin), buffers(plain))


# -- which blocks ------------------------------------------------------------------------------------------------------


class Sensors(nn.Module):
    """Branches of different kinds, none of which repeats."""

    checkpoint_blocks: Any = ("sound", "motion.body")

    def __init__(self) -> None:
        super().__init__()
        self.sound, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 3)
        self.motion = nn.ModuleDict({"body": nn.Linear(8, 8)})

    def forward(self, sound):
        return self.head(self.motion["body"](self.sound(sound)[0]))


def test_a_model_may_name_its_blocks():
    assert checkpoint_every_layer(Sensors()) == 2
    model = Sensors()
    model.checkpoint_blocks = lambda: [model.sound]
    assert checkpoint_every_layer(model) == 1
    assert checkpoint_every_layer(tiny.lora(Sensors())) == 2
    assert checkpoint_every_layer(nn.ModuleDict({"a": Sensors(), "b": tiny.llama()})) == 4


def test_a_name_that_does_not_exist_is_told():
    model = Sensors()
    model.checkpoint_blocks = ["sounds"]
    with pytest.raises(ModelError, match=r"Sensors.checkpoint_blocks names 'sounds'.*did you mean 'sound'"):
        checkpoint_every_layer(model)


@pytest.mark.parametrize(
    "model",
    [
        tiny.conv_net(),
        nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]),
        nn.Sequential(nn.Flatten(), nn.Linear(2, 2)),
        nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_nothing_to_checkpoint_is_an_error(model):
    with pytest.raises(ModelError, match=f"{type(model).__name__} has no repeated layers.*checkpoint_blocks"):
        checkpoint_every_layer(model)


def test_adapters_do_not_change_what_a_block_is():
    model = tiny.lora(seeded(Clips, False))
    assert checkpoint_every_layer(model) == 3


def test_a_layer_that_is_used_twice_counts_once():
    layer = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert checkpoint_every_layer(nn.Sequential(layer, layer, nn.Sequential(layer, nn.Tanh()))) == 1


# -- in every loop -----------------------------------------------------------------------------------------------------


def language_model() -> nn.Module:
    return tiny.lora(tiny.llama(hidden=8, attention_dropout=0.5), lora_dropout=0.5)


SUBJECTS = {
    "language model": (language_model, tiny.UnevenRows, "base_model.model.model.layers.0.mlp.up_proj.lora_A.default"),
    "images": (lambda: resnet(depths=(1, 1)), tiny.images, "resnet.encoder.stages.0.layers.0.layer.1.convolution"),
}
LOOPS = {
    "memory": {"memory": MemorySettings(token_cap=24)},
    "regularization": {"regularization": RegularizationSettings(target_s=0.1)},
    "curriculum": {"curriculum": CurriculumSettings(curriculum="noise_guard")},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", SUBJECTS)
def test_same_training_in_every_loop(tmp_path, name, loop):
    make, rows, _ = SUBJECTS[name]
    changes = {**LOOPS[loop], "data_collator": tiny.pad, "optim": "sgd", "max_steps": 5}
    plain, checkpointed = make(), make()
    checkpoint_every_layer(checkpointed)
    tiny.trained(plain, tmp_path / "plain", dataset=rows(8), **changes)
    tiny.trained(checkpointed, tmp_path / "checkpointed", dataset=rows(8), **changes)
    assert tiny.same(tiny.weights_of(checkpointed), tiny.weights_of(plain))
    assert tiny.same(buffers(checkpointed), buffers(plain))


def in_recompute(model: nn.Module, part: str) -> None:
    """Out of memory in the inside of a layer, when a backward computes it again for the fourth time."""
    calls = []

    def visit(*_) -> None:
        if torch._C._current_graph_task_id() != -1 and is_training():
            calls.append(part)
            if len(calls) == 4:
                raise oom()

    model.get_submodule(part).register_forward_pre_hook(visit)


def in_backward(model: nn.Module, part: str) -> None:
    """Out of memory when the weight's gradient is there: that of later layers has been added already."""
    calls = []

    def visit(_) -> None:
        calls.append(part)
        if len(calls) == 4:
            raise oom()

    model.get_submodule(part).weight.register_hook(visit)


@pytest.mark.parametrize("fault", [in_recompute, in_backward])
@pytest.mark.parametrize("name", SUBJECTS)
def test_out_of_memory_in_backward_is_recovered(tmp_path, name, fault):
    """Bit for bit what the same micro-batches give without a fault and without checkpointing."""
    make, rows, part = SUBJECTS[name]
    pieces, model = [], make()
    assert checkpoint_every_layer(model) == 2
    fault(model, part)
    changes = {"max_steps": 2, "dataset": rows(), "gradient_accumulation_steps": 2}
    faulty, found = compared(
        model,
        tmp_path / "a",
        MemorySettings(),
        prepare=lambda trainer: pieces.append(record_micro_batches(trainer)),
        **changes,
    )
    assert faulty.micro_batches.loop.statistics.out_of_memory == 1
    _, expected = compared(
        make(),
        tmp_path / "b",
        MemorySettings(),
        prepare=lambda trainer: replay_micro_batches(trainer, pieces[0]),
        **changes,
    )
    for steps, wanted in ((found.weights, expected.weights), (found.buffers, expected.buffers)):
        assert len(steps) == len(wanted) == 2
        assert all(tiny.same(*pair) for pair in zip(steps, wanted, strict=True))
