"""Images and videos of a batch are cut with the rows whose tokens they replace."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

pytest.importorskip("trl")
from datasets import Dataset
from PIL import Image
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    CLIPImageProcessorPil,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
    Trainer,
)
from trl import SFTConfig, SFTTrainer

from benchmarks.lib import image_text
from benchmarks.lib.common import RowList
from benchmarks.lib.exactness_cases import pad
from scu_trainer import SCUTrainer, with_loops
from scu_trainer.settings import MemorySettings
from scu_trainer.train.step import micro_batches
from scu_trainer.train.step.batches.media import entries_per_row, first_missing
from scu_trainer.train.step.batches.rows import layout_for, pick, placed, take
from tests import tiny
from tests.train.stepwise import FailsOnce, apart

IMAGE, VIDEO = 9, 8
MODEL = SimpleNamespace(
    config=SimpleNamespace(
        image_token_id=IMAGE, video_token_id=VIDEO, vision_config=SimpleNamespace(spatial_merge_size=2)
    )
)
ONE_SIZE = SimpleNamespace(config=SimpleNamespace(image_token_index=IMAGE))


def grids():
    """Three rows: two images of 1 and 2 tokens, none, and one of 2 tokens. Patches count from 0 to 19."""
    text = torch.tensor([[1, IMAGE, 1, IMAGE, IMAGE], [1, 1, 1, 1, 1], [IMAGE, IMAGE, 1, 1, 1]])
    return {
        "input_ids": text,
        "attention_mask": torch.ones_like(text),
        "pixel_values": torch.arange(20.0).unsqueeze(1).expand(20, 6),
        "image_grid_thw": torch.tensor([[1, 2, 2], [1, 2, 4], [2, 2, 2]]),
    }


def test_each_row_takes_its_own_patches():
    inputs = grids()
    batch = layout_for(MODEL, inputs)
    assert batch.obstacle is None and batch.trimmable
    assert entries_per_row(inputs["pixel_values"]) == [12, 0, 8]
    assert entries_per_row(inputs["image_grid_thw"]) == [2, 0, 1]
    part = take([batch], [(0, 2), (0, 0)])
    assert part["pixel_values"][:, 0].tolist() == [*range(12, 20), *range(12)]
    assert part["image_grid_thw"].tolist() == [[2, 2, 2], [1, 2, 2], [1, 2, 4]]
    again = pick(placed(part, torch.device("cpu")), torch.tensor([1]), 2)
    assert again["pixel_values"][:, 0].tolist() == list(range(12))


def test_rows_without_an_image_carry_none():
    part = take([layout_for(MODEL, grids())], [(0, 1)])
    assert set(part) == {"input_ids", "attention_mask"}


def test_rows_of_two_batches_bring_their_images():
    batches = [layout_for(MODEL, grids()) for _ in range(2)]
    part = take(batches, [(0, 2), (1, 0), (1, 1)])
    assert part["pixel_values"][:, 0].tolist() == [*range(12, 20), *range(12)]
    assert entries_per_row(part["pixel_values"]) == [8, 12, 0]


def test_videos_and_their_seconds_go_along():
    text = torch.tensor([[VIDEO, VIDEO, 1], [1, 1, VIDEO]])
    inputs = {"input_ids": text, "pixel_values_videos": torch.arange(12.0).unsqueeze(1)}
    inputs |= {"video_grid_thw": torch.tensor([[2, 2, 2], [1, 2, 2]]), "second_per_grid_ts": torch.tensor([0.5, 1.0])}
    part = take([layout_for(MODEL, inputs)], [(0, 1)])
    assert part["pixel_values_videos"][:, 0].tolist() == [8, 9, 10, 11] and part["second_per_grid_ts"].tolist() == [1.0]


def test_images_of_one_size_follow_the_tokens():
    text = torch.tensor([[IMAGE, IMAGE, IMAGE, IMAGE], [1, 1, 1, 1], [1, IMAGE, IMAGE, 1]])
    images = torch.arange(3.0).reshape(3, 1, 1, 1).expand(3, 3, 2, 2)  # as many as rows, by chance
    batch = layout_for(ONE_SIZE, {"input_ids": text, "pixel_values": images})
    assert take([batch], [(0, 0)])["pixel_values"][:, 0, 0, 0].tolist() == [0, 1]
    assert take([batch], [(0, 2)])["pixel_values"][:, 0, 0, 0].tolist() == [2]


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": torch.tensor([[1, 1, 1, IMAGE, IMAGE], [1, 1, 1, 1, 1], [IMAGE, IMAGE, 1, 1, 1]])},  # truncated
        {"pixel_values": torch.rand(19, 6)},
    ],
)
def test_media_that_do_not_come_out_even_stay_whole(change):
    inputs = grids()
    layout_for(MODEL, inputs)  # what was known of these tensors in another batch is forgotten
    inputs.update(change)
    batch = layout_for(MODEL, inputs)
    assert "entries for 3 rows of input_ids" in batch.obstacle


def test_a_batch_whose_media_are_known_is_cut_after_one_whose_were_not():
    assert layout_for(MODEL, grids(), {"pixel_values", "image_grid_thw"}).obstacle is None


def test_a_row_that_lacks_an_image_is_named():
    inputs = grids()
    layout_for(MODEL, inputs)
    assert first_missing(inputs) == "pixel_values"


@pytest.mark.parametrize("is_needed", [True, False])
def test_a_batch_stays_whole_where_all_ranks_must_look_at_images(monkeypatch, is_needed):
    monkeypatch.setattr(micro_batches, "needs_all_ranks", lambda trainer: is_needed)
    step = SimpleNamespace(trainer=SimpleNamespace(model=MODEL), _not_by_rows=set(), _obstacles=set())
    batch = micro_batches.MicroBatchStep._layout(step, grids())
    assert (batch.obstacle or "").startswith("some rows have no pixel_values") == is_needed == bool(step._obstacles)


def test_the_rows_of_a_real_model_are_found():
    rows = image_text.rows_for("qwen2_5_vl", 6)
    model = SimpleNamespace(
        config=SimpleNamespace(**image_text.SPECIAL, vision_config=SimpleNamespace(**image_text.GRIDS))
    )
    batch = layout_for(model, pad(rows))
    for number, row in enumerate(rows):
        part = take([batch], [(0, number)])
        assert ("pixel_values" in part) == ("pixel_values" in row)
        if "pixel_values" in row:
            assert torch.equal(part["pixel_values"], row["pixel_values"])


def test_an_evaluation_on_images_recovers_from_out_of_memory(tmp_path):
    def evaluated(kind: type[Trainer], **own) -> float:
        trainer = kind(
            llava(),
            tiny.arguments(tmp_path, per_device_eval_batch_size=4, remove_unused_columns=False),
            eval_dataset=RowList(image_text.rows_for("llava", 8)),
            data_collator=pad,
            **own,
        )
        if own:
            trainer.model.register_forward_pre_hook(fail_on_many, with_kwargs=True)
        return trainer.evaluate()["eval_loss"]

    def fail_on_many(module, args, given):
        failed.append(len(given["input_ids"]) > 2)
        if failed[-1]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    failed: list[bool] = []
    found = evaluated(SCUTrainer, memory=MemorySettings())
    assert any(failed) and found == pytest.approx(evaluated(Trainer), rel=1e-6)


# -- TRL ---------------------------------------------------------------------------------------------------------------

WORDS = ["<pad>", "<eos>", "<image>", "user", "assistant", *(f"w{number}" for number in range(40))]
TEMPLATE = """{% for message in messages %}{{ message['role'] }} {% for part in message['content'] -%}
{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }} {% endif %}{% endfor %}<eos> {% endfor -%}
{% if add_generation_prompt %}assistant {% endif %}"""


def processor() -> LlavaProcessor:
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="w0"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", additional_special_tokens=["<image>"]
    )
    images = CLIPImageProcessorPil(size={"shortest_edge": 8}, crop_size={"height": 8, "width": 8})
    how = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(images, tokenizer, chat_template=TEMPLATE, image_token="<image>", **how)


def llava(image_token: int = image_text.IMAGE) -> LlavaForConditionalGeneration:
    torch.manual_seed(0)
    config = image_text.CONFIGS["llava"] | {"image_token_id": image_token, "vision_feature_select_strategy": "default"}
    return LlavaForConditionalGeneration(AutoConfig.for_model("llava", **config))


def conversations(count: int = 16) -> Dataset:
    """Rows with one or two images, and with texts of several lengths."""
    noise = numpy.random.default_rng(0)

    def words(few: int) -> list[dict[str, str]]:
        return [{"type": "text", "text": " ".join(WORDS[5 + int(n)] for n in noise.integers(40, size=few))}]

    rows = []
    for number in range(count):
        images = 1 + number % 2
        rows.append(
            {
                "images": [Image.fromarray(noise.integers(255, size=(8, 8, 3), dtype="uint8")) for _ in range(images)],
                "prompt": [{"role": "user", "content": [{"type": "image"}] * images + words(2 + number % 5)}],
                "completion": [{"role": "assistant", "content": words(1 + number % 7)}],
            }
        )
    return Dataset.from_list(rows)


def tuned(kind: type[SFTTrainer], folder: Path, data: Dataset, **own) -> SFTTrainer:
    arguments = SFTConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        max_steps=3,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        max_length=None,
        optim="sgd",
        learning_rate=0.1,
        save_strategy="no",
    )
    trainer = kind(llava(WORDS.index("<image>")), arguments, train_dataset=data, processing_class=processor(), **own)
    trainer.train()
    return trainer


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated:FutureWarning")  # TRL's own setting
def test_sft_on_images_recovers_from_out_of_memory(tmp_path):
    data, fault = conversations(), FailsOnce()
    stock = tuned(SFTTrainer, tmp_path / "stock", copy.deepcopy(data))
    ours = tuned(
        with_loops(SFTTrainer), tmp_path / "ours", data, memory=MemorySettings(token_cap=40), callbacks=[fault]
    )
    statistics = ours.micro_batches.loop.statistics
    assert statistics.chunks > 2 * 3 and statistics.out_of_memory == 1 == fault.failed
    assert apart(ours, stock) < 1e-6
