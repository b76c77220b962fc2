"""ResNet-18 on images of 224 pixels: the command compared with a loop that a beginner would write.

    python benchmarks/studies/naive_images.py [--device cpu] [--steps 8] [--batch 16] [--repeats 2]

The loop decodes and resizes each JPEG file when it is needed, in the training process, and trains in float32 with the
default AdamW of torch. The command decodes once, uses the best precision of the device, channels last, a fused AdamW
and its loops. Each runs in its own process, in turn; the first two steps do not count. Peak memory is the highest
resident set of the process, or on a GPU the peak allocation of torch's allocator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
SIZE, CLASSES, UNCOUNTED = 224, 4, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--naive", type=Path, help="the loop itself, on this folder")
    options = parser.parse_args()
    if options.naive is not None:
        print(json.dumps(naive(options.naive, options)))
        return
    found: dict[str, list[dict[str, float]]] = {"loop": [], "command": []}
    with tempfile.TemporaryDirectory() as folder:
        pictures = written(Path(folder) / "pictures", 2 * options.batch)
        for repeat in range(options.repeats):
            found["loop"].append(by_loop(pictures, options))
            found["command"].append(by_command(pictures, Path(folder) / f"run{repeat}", options))
    show(found, options)


def show(found: dict[str, list[dict[str, float]]], options: argparse.Namespace) -> None:
    seconds, peaks = (
        {name: median(run[key] for run in runs) for name, runs in found.items()} for key in ("seconds", "peak_bytes")
    )
    for name in found:
        print(f"{name:8} {seconds[name]:6.2f} s per step, peak {peaks[name] / 2**20:7,.0f} MiB")
    print(
        f"{options.device}, batch {options.batch}: {seconds['loop'] / seconds['command']:.2f} x the speed of the loop, "
        f"{peaks['command'] / peaks['loop']:.2f} x its peak memory"
    )


def written(folder: Path, count: int) -> Path:
    """Write JPEG files of 320 x 256 pixels, in a folder per class."""
    generator = numpy.random.default_rng(0)
    for number in range(count):
        place = folder / f"class{number % CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = generator.integers(0, 256, (16, 20, 3), dtype=numpy.uint8)
        Image.fromarray(coarse).resize((320, 256)).save(place / f"{number}.jpg")
    return folder


def by_loop(pictures: Path, options: argparse.Namespace) -> dict[str, float]:
    words = ["--naive", pictures, "--device", options.device, "--steps", options.steps, "--batch", options.batch]
    return json.loads(said([sys.executable, __file__, *map(str, words)]).splitlines()[-1])


def by_command(pictures: Path, run: Path, options: argparse.Namespace) -> dict[str, float]:
    flags = {
        "dataset": pictures, "image_size": SIZE, "per_device_train_batch_size": options.batch, "augmentation": "none",
        "max_steps": options.steps, "logging_steps": 1, "eval_strategy": "no", "save_strategy": "no", "scu": "false",
        "curriculum": "none", "channels_last": "true", "throughput": "true", "validation_split_percentage": 0,
        "use_cpu": str(options.device == "cpu").lower(), "label_smoothing_factor": 0, "predict_memory": "false",
        "output_dir": run,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    code = (
        "import json, resource, sys, torch; from scu_trainer.cli import train; code = train.main(sys.argv[1:]); "
        "gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0; "
        "print(json.dumps(gpu or 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)); sys.exit(code)"
    )
    recipe = str(ROOT / "recipes" / "resnet.yaml")
    peak_bytes = json.loads(said([sys.executable, "-c", code, "--config", recipe, *words]).splitlines()[-1])
    rows = json.loads((run / "log_history.json").read_text())
    steps = [row["throughput/seconds_per_step"] for row in rows if "throughput/seconds_per_step" in row]
    return {"seconds": median(steps[UNCOUNTED - 1 :]), "peak_bytes": peak_bytes}  # the first step is not timed at all


def said(command: list[str]) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} ... ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


def naive(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    import resource

    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(0)
    config = ResNetConfig(layer_type="basic", depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], num_labels=CLASSES)
    model = ResNetForImageClassification(config).to(options.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    seconds, batches = [], endless(sorted(folder.rglob("*.jpg")), options.batch)
    for _ in range(options.steps):
        begun = time.perf_counter()
        pixels, labels = (part.to(options.device) for part in next(batches))
        loss = torch.nn.functional.cross_entropy(model(pixel_values=pixels).logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        loss.item()  # a beginner would print it, which waits for the device
        seconds.append(time.perf_counter() - begun)
    on_gpu = options.device == "cuda"
    peak = torch.cuda.max_memory_allocated() if on_gpu else 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"seconds": median(seconds[UNCOUNTED:]), "peak_bytes": peak}


def endless(files: list[Path], batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    place = 0
    while True:
        chosen = [files[(place + number) % len(files)] for number in range(batch)]
        place += batch
        images = [numpy.asarray(Image.open(file).resize((SIZE, SIZE))) for file in chosen]
        pixels = torch.from_numpy(numpy.stack(images)).permute(0, 3, 1, 2).float() / 255
        yield (pixels - 0.5) / 0.25, torch.tensor([int(file.parent.name[-1]) for file in chosen])


if __name__ == "__main__":
    main()
