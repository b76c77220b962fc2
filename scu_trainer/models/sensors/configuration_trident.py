"""Configuration of TRIDENT. This file is saved with each model, so it imports nothing from this project."""

from __future__ import annotations

from typing import ClassVar

from transformers import PreTrainedConfig


class TridentConfig(PreTrainedConfig):
    """Sizes of the sensor branches, their fusion, and the report head.

    branches: the model's branches, from ALL_BRANCHES. hidden_size: width of all tokens. stem_channels: channels of the
    first convolution of a branch that reads frames; later ones have twice as many. patch: time points per token of
    kinematics. kinematics_channels, geometry_channels: channels of these inputs. fusion_queries: number of learned
    queries that attend to the tokens of all branches. infrared_center, infrared_scale: temperatures in degrees Celsius
    are normalized by subtracting the center and dividing by the scale.

    report_words: words of reports by id; the first four are padding, unknown, begin and end. Empty for a model without
    a report head. report_length: words of the longest report, including the end. report_weight: weight of a report's
    loss relative to that of the class. num_report_layers: layers of the report decoder.
    """

    model_type: ClassVar[str] = "trident"
    ALL_BRANCHES: ClassVar[tuple[str, ...]] = (
        "visible",
        "infrared",
        "kinematics",
        "dual_vision",
        "plume",
        "cooling",
        "geometry",
    )

    branches: list[str] | tuple[str, ...] = ALL_BRANCHES[:3]
    hidden_size: int = 64
    intermediate_size: int = 128
    num_hidden_layers: int = 2
    num_fusion_layers: int = 2
    num_attention_heads: int = 4
    fusion_queries: int = 4
    stem_channels: int = 16
    patch: int = 4
    kinematics_channels: int = 6
    geometry_channels: int = 4
    dropout: float = 0.0
    infrared_center: float = 25.0
    infrared_scale: float = 10.0
    initializer_range: float = 0.02
    report_words: list[str] | tuple[str, ...] = ()
    report_length: int = 0
    report_weight: float = 1.0
    num_report_layers: int = 1
