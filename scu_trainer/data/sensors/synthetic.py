"""Generate recordings in which no single sensor determines the class, but any two together do.

There are k² classes (row r, column q). With s = (r + q) mod k, a Latin square:

    visible     shows r: the direction in which a bright blob moves; its start is random
    infrared    shows q: how fast the cooling curve falls, and how warm the hot spot is, also in the crop of the plume
    kinematics  shows s: the frequency of an oscillation; its phase is random
    geometry    shows s: the speed; range, azimuth and elevation are random

Given one of r, q, s, each of k classes is equally likely. So a model of only one sensor is right for at most 1 / k of
the recordings in expectation (1/3 with nine classes), and not more often if a sensor is missing. Given any two of the
three, the class is known, so a recording that lacks one of the first three sensors loses no information. Noise never
changes the value that a sensor shows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy

from scu_trainer.data.sensors.format import Recording, present_arrays, write_recordings
from scu_trainer.errors import DataError
from scu_trainer.settings.sensors import DEFAULT_BRANCHES

DEFAULT_CLASSES = 9
VISIBLE_SIDE, INFRARED_SIDE, PLUME_SIDE = 16, 12, 24
AMBIENT_CELSIUS = 22.0
CHANNELS = 6


def side_of(classes: int) -> int:
    """Return k for k² classes. Raises DataError if the number is not a square."""
    side = math.isqrt(classes)
    if side < 2 or side * side != classes:
        near = max(2, round(math.sqrt(classes))) ** 2
        raise DataError(
            f"num_classes is {classes}, but synthetic recordings need a square number of classes (4, 9, 16, ...); set "
            f"num_classes: {near}"
        )
    return side


def ceiling_alone(classes: int) -> float:
    """Return the highest expected accuracy with only one sensor."""
    return 1 / side_of(classes)


def synthetic(
    samples: int, classes: int = DEFAULT_CLASSES, seed: int = 0, missing_share: float = 0.0
) -> Iterator[Recording]:
    """Yield ``samples`` recordings, cycling through the classes. Each lacks one of the first three sensors with the
    probability ``missing_share``."""
    side = side_of(classes)
    for number in range(samples):
        rng = numpy.random.default_rng([seed, number])
        label = number % classes
        row, column = divmod(label, side)
        sensors = DEFAULT_BRANCHES
        missing = (sensors[rng.integers(len(sensors))],) if rng.random() < missing_share else ()
        arrays = {
            "visible": _visible(rng, row, side),
            "infrared": _infrared(rng, column, side),
            "cooling_curve": _cooling_curve(rng, column, side),
            "kinematics": _kinematics(rng, (row + column) % side, side),
            "plume": _plume(rng, column, side),  # added later, so last: the other arrays keep their random numbers
            "geometry": _geometry(rng, (row + column) % side, side),
        }
        shown = {name: arrays[name] for name in present_arrays(arrays, missing)}
        yield Recording(shown, label, missing, report=report_of(label, side))


def report_of(label: int, side: int) -> str:
    """Return the report of recordings of this class, for instance "class 3, plume dim, speed medium"."""
    row, column = divmod(label, side)
    plume, speed = _in_words(column, side, "dim", "bright"), _in_words((row + column) % side, side, "low", "high")
    return f"class {label}, plume {plume}, speed {speed}"


def _in_words(level: int, side: int, lowest: str, highest: str) -> str:
    return {0: lowest, side - 1: highest}.get(level, "medium")


def export_synthetic(folder: str | Path, samples: int = 200, classes: int = DEFAULT_CLASSES, seed: int = 0) -> int:
    """Write generated recordings in the format of ``format.py``; a tenth of them lacks a sensor. For example:

    python -c "from scu_trainer.data.sensors.synthetic import export_synthetic; export_synthetic('recordings')"
    """
    return write_recordings(Path(folder), synthetic(samples, classes, seed, missing_share=0.1))


def _visible(rng: numpy.random.Generator, row: int, side: int) -> numpy.ndarray:
    """Return a blob that moves about a pixel per frame over noise: uint8 (frames, 16, 16, 3)."""
    frames = int(rng.integers(6, 11))
    angle = 2 * math.pi * (row + rng.uniform(-0.15, 0.15)) / side
    start, speed = rng.uniform(5, 10, size=2), rng.uniform(0.8, 1.2)
    at = start + speed * numpy.arange(frames)[:, None] * numpy.array([math.sin(angle), math.cos(angle)])
    blob = 150 * _blobs(at, VISIBLE_SIDE, width=1.6)[..., None] * rng.uniform(0.6, 1.0, size=3)
    return numpy.clip(blob + rng.normal(60, 20, (frames, VISIBLE_SIDE, VISIBLE_SIDE, 3)), 0, 255).astype("uint8")


def _infrared(rng: numpy.random.Generator, column: int, side: int) -> numpy.ndarray:
    """Return a hot spot at a random place: degrees Celsius, float16 (frames, 12, 12)."""
    frames = int(rng.integers(4, 8))
    at = rng.uniform(2, INFRARED_SIDE - 3, size=2) + rng.normal(0, 0.2, size=(frames, 2))
    above = 15 + 30 * (column + rng.uniform(-0.3, 0.3)) / (side - 1)
    spot = above * _blobs(at, INFRARED_SIDE, width=1.4)
    return (AMBIENT_CELSIUS + spot + rng.normal(0, 0.5, spot.shape)).astype("float16")


def _cooling_curve(rng: numpy.random.Generator, column: int, side: int) -> numpy.ndarray:
    """Return a curve by Newton's law of cooling: degrees Celsius, float32 (points,)."""
    points = int(rng.integers(16, 29))
    constant = 3.0 * 4 ** ((column + rng.uniform(-0.2, 0.2)) / (side - 1) * 1.2)
    curve = rng.uniform(20, 40) * numpy.exp(-numpy.arange(points) / constant)
    return (AMBIENT_CELSIUS + curve + rng.normal(0, 0.3, points)).astype("float32")


def _kinematics(rng: numpy.random.Generator, level: int, side: int) -> numpy.ndarray:
    """Return oscillations of one frequency in six channels: float32 (time, 6)."""
    time = int(rng.integers(32, 65))
    cycles = 0.05 + 0.12 * (level + rng.uniform(-0.2, 0.2)) / (side - 1)
    phase, amplitude = rng.uniform(0, 2 * math.pi, CHANNELS), rng.uniform(0.7, 1.3, CHANNELS)
    waves = amplitude * numpy.sin(2 * math.pi * cycles * numpy.arange(time)[:, None] + phase)
    return (waves + rng.normal(0, 0.3, waves.shape)).astype("float32")


def _plume(rng: numpy.random.Generator, column: int, side: int) -> numpy.ndarray:
    """Return a plume near the middle of its crop, of random width: degrees Celsius, float16 (frames, 24, 24)."""
    frames = int(rng.integers(2, 5))
    at = (PLUME_SIDE - 1) / 2 + rng.normal(0, 1.5, size=(frames, 2))
    above = 15 + 30 * (column + rng.uniform(-0.3, 0.3)) / (side - 1)
    plume = above * _blobs(at, PLUME_SIDE, width=rng.uniform(2.5, 3.5))
    return (AMBIENT_CELSIUS + plume + rng.normal(0, 0.5, plume.shape)).astype("float16")


def _geometry(rng: numpy.random.Generator, level: int, side: int) -> numpy.ndarray:
    """Return range in m, azimuth and elevation in rad, and speed in m/s: float32 (4,)."""
    speed = 20 + 200 * (level + rng.uniform(-0.3, 0.3)) / (side - 1)
    position = (rng.uniform(500, 5000), rng.uniform(-math.pi, math.pi), rng.uniform(0, math.pi / 2))
    return numpy.array([*position, max(speed, 0.0)], dtype="float32")


def _blobs(at: numpy.ndarray, side: int, width: float) -> numpy.ndarray:
    """Return Gaussians of height 1, centred at ``at`` (frames, 2), y and x: (frames, side, side)."""
    grid = numpy.stack(numpy.meshgrid(numpy.arange(side), numpy.arange(side), indexing="ij"), axis=-1)
    distance = ((grid - at[:, None, None, :]) ** 2).sum(axis=-1)
    return numpy.exp(-distance / (2 * width**2))
