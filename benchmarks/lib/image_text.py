"""Tiny vision-language models and rows with no, one or two images each: cases for benchmarks/loops/exactness.py."""

from __future__ import annotations

import random
from typing import Any

import torch

from benchmarks.lib.exactness_cases import VOCAB

IMAGE, START, END = 40, 41, 42
SPECIAL = {"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END, "video_token_id": 43}
GLM_SPECIAL = {"image_start_token_id": START, "image_end_token_id": END, "video_token_id": 43}

TEXT = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
SECTIONS = {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}}

LAYERS = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SQUARES = {**LAYERS, "image_size": 8, "patch_size": 4}
GRIDS = {
    "depth": 2,
    "hidden_size": 32,
    "embed_dim": 32,
    "out_hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "mlp_ratio": 2,
    "patch_size": 2,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "window_size": 16,
    "image_size": 16,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 64,
}
CLIP = {"model_type": "clip_vision_model", **SQUARES, "projection_dim": 32}
SIGLIP = {"model_type": "siglip_vision_model", **SQUARES, "vision_use_head": False}
INTERN = {"model_type": "internvl_vision", **LAYERS, "image_size": [8, 8], "patch_size": [2, 2]}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": SIGLIP,
        "text_config": {**TEXT, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
        "mm_tokens_per_image": 4,
        "image_token_id": IMAGE,
    },
    "glm4v": {"vision_config": GRIDS, "text_config": {**TEXT, **SECTIONS}, "image_token_id": IMAGE, **GLM_SPECIAL},
    "internvl": {"vision_config": INTERN, "text_config": {"model_type": "qwen2", **TEXT}, "image_token_id": IMAGE},
    "llava": {
        "vision_config": CLIP,
        "text_config": {"model_type": "llama", **TEXT},
        "image_token_id": IMAGE,
        "vision_feature_layer": -1,
    },
    "paligemma": {
        "vision_config": SIGLIP,
        "text_config": {"model_type": "gemma", **TEXT},
        "image_token_id": IMAGE,
        "projection_dim": 32,
    },
    "qwen2_5_vl": {"vision_config": GRIDS, "text_config": {**TEXT, **SECTIONS}, **SPECIAL},
    "qwen2_vl": {"vision_config": GRIDS, "text_config": {**TEXT, **SECTIONS}, **SPECIAL},
    "qwen3_5": {
        "vision_config": GRIDS,
        "text_config": {**TEXT, **SECTIONS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]},
        **SPECIAL,
    },
    "qwen3_vl": {"vision_config": GRIDS, "text_config": {**TEXT, **SECTIONS}, **SPECIAL},
    "qwen3_vl_moe": {"vision_config": GRIDS, "text_config": {**TEXT, **SECTIONS, **EXPERTS}, **SPECIAL},
}
"""Architectures -> the settings of a tiny one. The batches of those with ``GRIDS`` hold patches and the grid of each
image; those of the others hold images of 8 x 8 pixels, each of which replaces four tokens."""

TOKENS_PER_IMAGE = 4


def rows_for(model_type: str, count: int = 24) -> list[dict[str, Any]]:
    """Return rows of text with 0, 1, 2, 0, 1, ... images each."""
    draw, noise = random.Random(0), torch.Generator().manual_seed(0)
    has_grids = CONFIGS[model_type]["vision_config"] is GRIDS
    rows = []
    for number in range(count):
        row: dict[str, Any] = {}
        ids = [draw.randrange(3, IMAGE) for _ in range(4 + number % 5)]
        grids = [[1, 2 * draw.randrange(1, 4), 2 * draw.randrange(1, 3)] for _ in range(number % 3)]
        for _, height, width in grids:
            tokens = height * width // GRIDS["spatial_merge_size"] ** 2 if has_grids else TOKENS_PER_IMAGE
            ids += [START, *[IMAGE] * tokens, END, *(draw.randrange(3, IMAGE) for _ in range(3))]
        if grids and has_grids:
            patches = sum(height * width for _, height, width in grids)
            row["pixel_values"] = torch.randn(patches, 3 * 2 * 2 * 2, generator=noise)
            row["image_grid_thw"] = torch.tensor(grids)
        elif grids:
            row["pixel_values"] = torch.randn(len(grids), 3, 8, 8, generator=noise)
        row["mm_token_type_ids" if has_grids else "token_type_ids"] = [int(token == IMAGE) for token in ids]
        rows.append({"input_ids": ids, "labels": [-100 if token == IMAGE else token for token in ids], **row})
    if not has_grids and model_type not in ("gemma3", "paligemma"):
        rows = [{name: value for name, value in row.items() if name != "token_type_ids"} for row in rows]
    return rows
