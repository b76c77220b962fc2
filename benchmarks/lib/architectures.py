"""Every text architecture of transformers, and some with images, made tiny: cases for benchmarks/loops/exactness.py."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import transformers
from transformers.models.auto import configuration_auto, modeling_auto

from benchmarks.lib import image_text
from benchmarks.lib.exactness_cases import VOCAB, Case
from scu_trainer.errors import SettingsError

BOUND = 1e-5
"""Rounding in float32 goes beyond it where experts or sparse activations choose by small differences. There, float64
decides: if the same training is exact in it, the difference was a choice that rounding changed."""

MOST_WEIGHTS = 20_000_000

MAPPINGS = {
    "causal": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "masked": modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "sequence": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "question": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
    "images": {name: modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name] for name in image_text.CONFIGS},
}

SIZES = {
    32: "hidden_size d_model n_embd dim embed_dim emb_dim embedding_size",
    48: "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim hidden_dim",
    24: "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size",
    2: "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
    "num_encoder_layers num_key_value_heads num_kv_heads num_experts_per_tok type_vocab_size",
    4: "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads num_experts "
    "num_local_experts n_routed_experts mamba_n_heads mamba_num_heads rotary_dim",
    8: "head_dim d_kv qk_rope_head_dim qk_nope_head_dim v_head_dim state_size mamba_d_state ssm_state_size",
    16: "q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim",
    1: "n_group topk_group mamba_n_groups pad_vocab_size_multiple eos_token_id",
    64: "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions",
    0: "pad_token_id bos_token_id decoder_start_token_id classifier_dropout",
    VOCAB: "vocab_size vocab_size_per_layer_input",
}
"""Sizes -> the settings of configurations that get them."""

LATENT = "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa longcat_flash minicpm3 youtu"
"""Architectures whose attention takes as many keys as queries."""

LAYERS: dict[str, dict[str, Any]] = {
    **{name: {"num_key_value_heads": 4} for name in LATENT.split()},
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {"layers_block_type": ["mamba", "attention"], "n_groups": 1},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "xmod": {"default_language": "en_XX"},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 8,
    },
}
"""Architectures whose layers must fit each other -> further settings."""


def tiny_config(kind: type) -> Any:
    """Return a configuration of this class with small sizes, without dropout. Raises what the class raises."""
    wanted = {name: size for size, names in SIZES.items() for name in names.split()}
    usual = kind()
    changes = {name: size for name, size in wanted.items() if name in vars(usual) or _may_be_set(kind, name)}
    changes |= {name: 0.0 for name, value in vars(usual).items() if "drop" in name and type(value) is float}
    changes |= {"classifier_dropout": 0.0, "decoder_start_token_id": 0, **LAYERS.get(kind.model_type, {})}
    try:
        return kind(**changes)
    except NotImplementedError:  # some have these names for reading only
        read_only = "num_hidden_layers", "max_position_embeddings"
        return kind(**{name: value for name, value in changes.items() if name not in read_only})


def _may_be_set(kind: type, name: str) -> bool:
    found = getattr(kind, name, None)
    return hasattr(kind, name) and not (isinstance(found, property) and found.fset is None)


def rows_for(head: str, count: int = 24) -> list[dict[str, Any]]:
    draw, rows = random.Random(0), []
    for number in range(count):
        length = 5 + 7 * number % 17
        ids = [draw.randrange(3, VOCAB) for _ in range(length)]
        labels: Any = [-100, -100, *ids[2:]]
        if head == "masked":
            labels = [token if draw.random() < 0.4 or not place else -100 for place, token in enumerate(ids)]
        elif head == "seq2seq":
            labels = [draw.randrange(3, VOCAB) for _ in range(3 + 3 * number % 6)]
            ids[-1] = 1  # BART reads a row up to its end
        elif head == "sequence":
            labels, ids[-1] = number % 2, 1
        elif head == "token":
            labels = [-100, *(draw.randrange(2) for _ in ids[1:])]
        if head == "question":
            rows.append({"input_ids": ids, "start_positions": number % 4, "end_positions": number % 4})
        else:
            rows.append({"input_ids": ids, "labels": labels})
    return rows


def made_model(head: str, model_type: str, name: str) -> Callable[[], torch.nn.Module]:
    """Return a function that makes the model. Raises whatever its configuration or its class raise, ValueError if it
    stays large."""
    kind = getattr(transformers, name)
    config_kind = configuration_auto.CONFIG_MAPPING[model_type]
    config = config_kind(**image_text.CONFIGS[model_type]) if head == "images" else tiny_config(config_kind)
    with torch.device("meta"):
        count = sum(weight.numel() for weight in kind(config).parameters())
    if count > MOST_WEIGHTS:
        raise ValueError(f"{count:,} weights")

    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return kind(config)

    return make


def _in_float64(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return make().double()


def results_of(
    outcome: Callable[[Case], dict[str, Any]], head: str, only: Collection[str] = ()
) -> Iterator[dict[str, Any]]:
    """Train every architecture with this head, as ``outcome`` does; yield one result for each way to train it."""
    ways = {"": {"token_cap": 40}}
    if head in ("causal", "images"):
        ways["chunked"] = {"token_cap": 60, "chunked_loss": "always"}
    for model_type, names in sorted(MAPPINGS[head].items()):
        for way, cut in ways.items() if not only or model_type in only else ():
            result = {"head": head, "architecture": model_type, "way": way}
            try:
                make = made_model(head, model_type, names if isinstance(names, str) else names[0])
                rows = image_text.rows_for(model_type) if head == "images" else rows_for(head)
                case = Case(0, model_type, head, True, make, rows, accumulation=2, batch=4, cut=cut)
                found = outcome(case)
                if found["draws"]:
                    raise ValueError("its forward draws random numbers, also without dropout")
                if found["worst"] > BOUND and not found["warned"]:  # a choice by a small difference, or a fault?
                    result["worst_in_float32"] = found["worst"]
                    found["worst"] = outcome(replace(case, make=partial(_in_float64, make)))["worst"]
            except SettingsError as error:  # it says that this way is not for this model
                yield {**result, "refused": str(error).partition(";")[0]}
            except Exception as error:  # the stock Trainer cannot train what came out
                yield {**result, "not_tried": f"{type(error).__name__}: {error}".partition("\n")[0][:160]}
                break
            else:
                yield {**result, **{key: found[key] for key in ("worst", "is_split", "warned", "known", "why_whole")}}
            gc.collect()


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    tried = [one for one in results if "worst" in one]
    wrong = [one for one in tried if one["worst"] > BOUND]
    silent = [one for one in wrong if not one["warned"]]
    return {
        "trained": len(tried),
        "architectures": len({one["architecture"] for one in tried}),
        "in_micro_batches": sum(one["is_split"] for one in tried),
        "largest_difference": max((one["worst"] for one in tried if one not in wrong), default=0.0),
        "decided_in_float64": sum("worst_in_float32" in one for one in results),
        "wrong_and_reported": len(wrong) - len(silent),
        "silently_wrong": [f"{one['head']} {one['architecture']} {one['way']}".strip() for one in silent],
        "refused": sum("refused" in one for one in results),
        "not_tried": sum("not_tried" in one for one in results),
    }
