"""Small real parts for tests: models made from a config, token rows, trainers."""

from __future__ import annotations

import dataclasses

import torch
from transformers import (
    GraniteMoeHybridForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
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


def granite_hybrid(seed: int = 0) -> GraniteMoeHybridForCausalLM:
    from scu_trainer.models.embedded import base_config

    torch.manual_seed(seed)
    return GraniteMoeHybridForCausalLM(base_config(VOCAB, bos=0, eos=1, pad=2))


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


def pad(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Collator that pads on the right: token 2, label -100, attention 0."""

    def stack(tensors: list[torch.Tensor], value: int) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=value)

    tokens = [row["input_ids"] for row in rows]
    return {
        "input_ids": stack(tokens, 2),
        "labels": stack([row["labels"] for row in rows], -100),
        "attention_mask": stack([torch.ones_like(row) for row in tokens], 0),
    }


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


def saved_llama(folder, seed: int = 0):
    """Folder with a tiny Llama for the embedded tokenizer, and that tokenizer."""
    from scu_trainer.data import default_cache_dir, embedded_tokenizer

    tokenizer = embedded_tokenizer(default_cache_dir(None))
    model = llama(seed)
    model.resize_token_embeddings(len(tokenizer))
    model.config.bos_token_id, model.config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    model.config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def trained(model, output_dir, regularization=None, dataset=None, resume=None, prepare=None, **changes):
    """An SCUTrainer that has trained ``model``; without ``regularization`` it is the stock one.

    ``changes``: arguments of the Trainer or of its TrainingArguments. ``prepare`` gets the trainer before it starts.
    """
    from scu_trainer.train.trainer import SCUTrainer

    own_names = {item.name for item in dataclasses.fields(TrainingArguments)}
    extra = {name: changes.pop(name) for name in list(changes) if name not in own_names}
    trainer = SCUTrainer(
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
