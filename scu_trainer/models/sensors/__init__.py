"""TRIDENT, registered with ``AutoConfig``, ``AutoModel`` and ``AutoModelForSequenceClassification``."""

from __future__ import annotations

from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from scu_trainer.models.sensors.configuration_trident import TridentConfig
from scu_trainer.models.sensors.modeling_trident import TridentForSensorClassification

AutoConfig.register(TridentConfig.model_type, TridentConfig)
AutoModel.register(TridentConfig, TridentForSensorClassification)
AutoModelForSequenceClassification.register(TridentConfig, TridentForSensorClassification)

__all__ = ["TridentConfig", "TridentForSensorClassification"]
