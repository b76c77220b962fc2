"""Sizes of TRIDENT. This file is copied beside saved models, so it names nothing of this project."""

from __future__ import annotations

from typing import ClassVar

from transformers import PreTrainedConfig


class TridentConfig(PreTrainedConfig):
    """Sensor branches and their fusion.

    branches: those that the model has, of ALL_BRANCHES. hidden_size: width of all tokens. stem_channels: of the first
    convolution of a branch that looks at frames, twice as many in the later ones. patch: points of time that make one
    token of kinematics. kinematics_channels, geometry_channels: of their input. fusion_queries: learned queries that
    collect what the branches say. infrared_center, infrared_scale: degrees Celsius that become 0, and that become 1
    above it.

    report_words: that reports are written in, by number; the first four are padding, what is unknown, the begin and the
    end; empty for a model without a report head. report_length: words of the longest report, with the end.
    report_weight: of the loss of a report beside that of the class. num_report_layers: of its decoder.
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
