"""Settings: one small dataclass per concern, each of which checks its values when it is created.

Stock training options are not repeated here: they stay in ``transformers.TrainingArguments``, and the command line
combines both. On the command line the fields of ``RegularizationSettings`` have the prefix ``scu_``.
"""

from scu_trainer.settings.curriculum import METHODS, CurriculumSettings
from scu_trainer.settings.data import EMBEDDED_DATASETS, DataSettings
from scu_trainer.settings.efficiency import EfficiencySettings
from scu_trainer.settings.memory import BYTES, MemorySettings, size_in_gib
from scu_trainer.settings.model import DEVICE_MAPS, ModelSettings
from scu_trainer.settings.regularization import RegularizationSettings, RetentionSettings
from scu_trainer.settings.safety import SafetySettings

__all__ = [
    "BYTES",
    "DEVICE_MAPS",
    "EMBEDDED_DATASETS",
    "METHODS",
    "CurriculumSettings",
    "DataSettings",
    "EfficiencySettings",
    "MemorySettings",
    "ModelSettings",
    "RegularizationSettings",
    "RetentionSettings",
    "SafetySettings",
    "size_in_gib",
]
