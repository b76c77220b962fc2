"""The Python interface that the seed documents name, in our words: epoch by epoch, checkpoints, memory, difficulties.

python docs/seeds_api.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import TrainingArguments

from scu_trainer import SCUTrainer, wrap
from scu_trainer.settings import CurriculumSettings, MemorySettings
from scu_trainer.train.step.recovery.memory_monitor import MemoryMonitor


def main(folder: Path) -> None:
    torch.manual_seed(0)
    classes = torch.arange(60) % 3
    points = 5 * torch.nn.functional.one_hot(classes, 6) + torch.randn(60, 6)
    trainer = SCUTrainer(
        wrap(torch.nn.Linear(6, 3), loss=torch.nn.CrossEntropyLoss()),
        TrainingArguments(
            str(folder / "run"),
            num_train_epochs=3,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=list(zip(points, classes, strict=True)),
        memory=MemorySettings(min_batch_size=4, max_batch_size=64, target_headroom_gb=0.5),
        curriculum=CurriculumSettings("acmds", difficulty_alpha=0.3),
    )
    with MemoryMonitor() as monitor:
        for metrics in trainer.epochs():
            place = folder / f"checkpoint_epoch_{metrics['epoch']:.0f}"
            trainer.save(place)
            print(f"epoch {metrics['epoch']:.0f}: train_loss {metrics['train_loss']:.3f}, saved {place.name}")
        sample = monitor.metrics_queue.get(timeout=10)
    print(f"metrics_queue: {', '.join(sorted(sample))}")
    print(f"difficulty.scores: {trainer.difficulty.scores.shape}, {trainer.difficulty.scores.dtype}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
