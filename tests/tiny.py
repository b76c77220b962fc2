"""Small real parts for tests: models made from a config, token rows, trainers."""

from __future__ import annotations

import dataclasses

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

VOCAB = 64


def llama(seed: int = 0, hidden: int = 32, layers: int = 2, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        **changes,
    )
    return LlamaForCausalLM(config)


def small_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Of one layer, for where a second one would do the same once more."""
    return llama(seed, layers=1, **changes)


def granite_hybrid(seed: int = 0) -> GraniteMoeHybridForCausalLM:
    from scu_trainer.models.embedded import base_config

    torch.manual_seed(seed)
    return GraniteMoeHybridForCausalLM(base_config(VOCAB, bos=0, eos=1, pad=2))


def gpt2(seed: int = 0, **changes) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1}
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, **{**sizes, **no_dropout, **changes}))


def bert(kind: type, seed: int = 0, **changes):
    """``kind``: BertForMaskedLM, BertForSequenceClassification, ..."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return kind(BertConfig(vocab_size=VOCAB, pad_token_id=2, **{**sizes, **no_dropout, **changes}))


def t5(seed: int = 0) -> T5ForConditionalGeneration:
    torch.manual_seed(seed)
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return T5ForConditionalGeneration(
        T5Config(vocab_size=VOCAB, pad_token_id=2, decoder_start_token_id=2, eos_token_id=1, **sizes)
    )


def bart(seed: int = 0, **changes) -> BartForConditionalGeneration:
    torch.manual_seed(seed)
    sides = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 1), ("ffn_dim", 16))}
    sides |= {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    tokens = {"pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 2}
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB, d_model=16, max_position_embeddings=64, **{"dropout": 0.0, **sides, **tokens, **changes}
        )
    )


def vit(seed: int = 0) -> ViTForImageClassification:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**sizes, **no_dropout, image_size=8, patch_size=4, num_labels=3))


class ConvNet(torch.nn.Module):
    """A classifier of pictures whose BatchNorm makes the rows of a batch act on each other."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4)
        self.head = torch.nn.Linear(4, 3)

    def forward(self, pixel_values, labels):
        hidden = self.norm(self.conv(pixel_values)).relu().mean(dim=(2, 3))
        return {"loss": torch.nn.functional.cross_entropy(self.head(hidden), labels)}


def conv_net(seed: int = 0) -> ConvNet:
    torch.manual_seed(seed)
    return ConvNet()


def lora(model, r: int = 4, alpha: float = 8.0, seed: int = 1, **changes):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    return get_peft_model(model, LoraConfig(r=r, lora_alpha=alpha, target_modules="all-linear", **changes))


class Rows(torch.utils.data.Dataset):
    """``count`` rows of ``length`` tokens that repeat a pattern with noise, so that there is something to learn."""

    def __init__(self, count: int = 32, length: int = 16, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(3, VOCAB, (count, 1), generator=generator)
        noise = (torch.rand(count, length, generator=generator) < 0.1) * torch.randint(
            0, VOCAB, (count, length), generator=generator
        )
        self.tokens = 3 + (starts + 7 * torch.arange(length) + noise) % (VOCAB - 3)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index].clone()}


class UnevenRows(Rows):
    """Rows of 4 to ``length`` tokens; the first two are a prompt that is not learned (label -100). Needs ``pad``."""

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = self.tokens[index]
        tokens = tokens[: 4 + 7 * index % (len(tokens) - 3)]
        labels = tokens.clone()
        labels[:2] = -100
        return {"input_ids": tokens, "labels": labels}


class Examples(torch.utils.data.Dataset):
    """Rows that are given."""

    def __init__(self, rows) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return dict(self.rows[index])


def pairs(count: int = 32) -> Examples:
    """Source and target of uneven lengths, 4 to 14 and 2 to 8 tokens, for an encoder-decoder."""
    source, target = Rows(count, 14, seed=1).tokens, Rows(count, 8, seed=2).tokens
    return Examples(
        {"input_ids": source[i, : 4 + 5 * i % 11], "labels": target[i, : 2 + 3 * i % 7]} for i in range(count)
    )


def images(count: int = 32) -> Examples:
    """Pictures of 8 x 8 in three classes."""
    generator = torch.Generator().manual_seed(3)
    pixels = torch.rand(count, 3, 8, 8, generator=generator)
    return Examples({"pixel_values": pixels[i], "labels": torch.tensor(i % 3)} for i in range(count))


def labelled(count: int = 32, label=lambda i: torch.tensor(i % 2)) -> Examples:
    """Text of 4 to 16 tokens with one label per row."""
    tokens = Rows(count, 16).tokens
    return Examples({"input_ids": tokens[i, : 4 + 7 * i % 13], "labels": label(i)} for i in range(count))


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collator that pads on the right: token 2, label -100, attention and all else 0. Fixed shapes are stacked."""

    def join(name: str) -> torch.Tensor:
        tensors = [row[name] for row in rows]
        if tensors[0].dim() != 1:
            return torch.stack(tensors)
        value = {"input_ids": 2, "labels": -100}.get(name, 0)
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    batch = {name: join(name) for name in rows[0]}
    if "input_ids" in batch and "attention_mask" not in batch:
        batch["attention_mask"] = join_masks([row["input_ids"] for row in rows])
    return batch


def join_masks(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)


def arguments(output_dir, **changes) -> TrainingArguments:
    defaults = {
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "save_strategy": "no",
        "logging_steps": 1000,
        "seed": 0,
    }
    return TrainingArguments(output_dir=str(output_dir), **{**defaults, **changes})


def saved_llama(folder, seed: int = 0, layers: int = 2):
    """Folder with a tiny Llama for the embedded tokenizer, and that tokenizer."""
    from scu_trainer.data import default_cache_dir, embedded_tokenizer

    tokenizer = embedded_tokenizer(default_cache_dir(None))
    model = llama(seed, layers=layers)
    model.resize_token_embeddings(len(tokenizer))
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def end_every_text(tokenizer) -> None:
    """As add_eos_token does for Llama: eos is put behind each text."""
    from tokenizers.processors import TemplateProcessing

    begin, end = tokenizer.bos_token, tokenizer.eos_token
    numbers = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in (begin, end)]
    processor = TemplateProcessing(single=f"{begin} $A {end}", special_tokens=numbers)
    tokenizer.backend_tokenizer.post_processor = processor


def trained(model, output_dir, regularization=None, dataset=None, resume=None, prepare=None, kind=None, **changes):
    """An SCUTrainer (or ``kind``) that has trained ``model``; without ``regularization`` it is the stock one.

    ``changes``: arguments of the Trainer or of its TrainingArguments. ``prepare`` gets the trainer before it starts.
    """
    from scu_trainer.train.trainer import SCUTrainer

    own_names = {item.name for item in dataclasses.fields(TrainingArguments)}
    extra = {name: changes.pop(name) for name in list(changes) if name not in own_names}
    trainer = (kind or SCUTrainer)(
        model, arguments(output_dir, **changes), train_dataset=dataset or Rows(), regularization=regularization, **extra
    )
    if prepare is not None:
        prepare(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights_of(model) -> dict[str, torch.Tensor]:
    """Copies of all trainable weights by name."""
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
