"""Settings of image classifiers: the architecture, the size of images, and their augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional

from scu_trainer.settings.base import Allowed, check_fields, option, require

EMBEDDED_IMAGES = ("digits", "generated")
SMALLEST_IMAGE = 8  # pixels


@dataclass(frozen=True)
class ImageSettings:
    """The image classifier and its inputs."""

    architecture: Literal["resnet18", "resnet50", "resnet101", "efficientnet_b0"] = option(
        "resnet18", "image classifier to train from scratch; model_name_or_path overrides it"
    )
    image_size: Optional[int] = option(
        None,
        "pixels per side; default: the size with which a loaded model was trained, else the size of the first "
        "image, rounded up to 32, 64, 96, 128 or 224",
    )
    image_channels: Optional[int] = option(
        None, "1: gray images, 3: RGB; default: the channels of a loaded model, else 3"
    )
    image_column_name: Optional[str] = option(None, "column with images; default: image, img, or the only such column")
    label_column_name: Optional[str] = option(
        None, "column with classes; default: label, labels, fine_label, cls, class, or the only column of classes"
    )
    augmentation: Literal["none", "light", "standard", "strong"] = option(
        "light",
        "random changes of training images. light: small shifts, rotations and scalings, no mirroring (for digits, "
        "text); standard: cropping and mirroring; strong: also changes of colour, and an erased part",
    )

    def __post_init__(self) -> None:
        check_fields(self, {"image_size": Allowed(least=SMALLEST_IMAGE)})
        channels = self.image_channels
        require(channels in (None, 1, 3), f"image_channels is {channels}; allowed: 1 (gray), 3 (RGB)")


DEFAULTS: dict[str, object] = {
    "dataset": "digits",
    "tuning": "full",
    "scu": False,  # lambda would decay back to random weights
    "validation_split_percentage": 20.0,
    "num_train_epochs": 10.0,
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 128,
    "learning_rate": 2.0e-3,
    "weight_decay": 0.05,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.1,
    "keep_freed_memory": True,
}

PRESETS: dict[str, dict[str, object]] = {
    "gpu": {
        "per_device_train_batch_size": 256,
        "dataloader_num_workers": 8,  # at most one per core
        "dataloader_pin_memory": True,
        "dataloader_persistent_workers": True,
        "optim": "adamw_torch_fused",
        "mixed_precision": "auto",
        "torch_compile": True,
        "cudnn_benchmark": True,
        "torch_compile_mode": "reduce-overhead",  # only if all batches have the same size
        "channels_last": True,
    },
    "cpu": {
        "per_device_train_batch_size": 32,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
        "dataloader_persistent_workers": False,
        "optim": "adamw_torch_fused",
        "mixed_precision": "auto",
        "torch_compile": False,
        "channels_last": False,
    },
    "memory_efficient": {
        "per_device_train_batch_size": 32,
        "dataloader_num_workers": 1,
        "dataloader_pin_memory": False,
        "dataloader_persistent_workers": False,
        "optim": "adamw_bnb_8bit",
        "mixed_precision": "auto",
        "checkpoint_every_layer": True,
        "torch_compile": False,
        "channels_last": True,
    },
}
"""gpu: compiled, with images loaded ahead. cpu: compilation and other memory layouts do not help there, and reading
from the cache costs less than a second process. memory_efficient: few activations and a small optimizer state, at the
cost of time; the batch size stays, because mean losses of accumulated smaller batches would add up to a larger loss."""

MODES: dict[str, dict[str, object]] = {
    "tiny": {"dataset_size": 400, "num_train_epochs": 1.0, "max_steps": -1},
    "standard": {"dataset_size": None, "num_train_epochs": 10.0, "max_steps": -1},
    "extended": {"dataset_size": None, "num_train_epochs": 40.0, "max_steps": -1},
}
"""Named groups of values. ``max_steps`` of -1 trains for the epochs, and ``dataset_size`` None uses all images. Modes
do not change architecture and image size, which decide what the model is, not how long it trains."""
