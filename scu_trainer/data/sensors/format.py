"""Recordings on disk: a folder with a manifest, and one .npz file per recording.

    FOLDER/manifest.jsonl     one JSON object per line (or manifest.csv, with a header)
    FOLDER/.../NAME.npz       arrays of one recording; nothing in it is ever unpickled

Columns of the manifest:

    file      path of the .npz, relative to the folder and inside it
    label     class of the recording: a name, or a whole number from 0 on
    split     optional, in upper or lower case: "train" (or the value of dataset_split), or empty, to train on it. To
              hold it out: "eval", "validation", "valid", "val", "dev" or "test"; only the first of these that occurs
              is used. If none occurs, a random share is held out
    missing   optional: list of sensors or arrays that the recording lacks (in CSV: separated by ";"); a sensor means
              all of its arrays. Declared arrays are not read. It is an error if an array that a branch in use reads is
              neither in the file nor declared missing
    report    optional: a short text about the recording, which report_head: true learns to write

Other columns are listed in the log and not read.

Arrays of a .npz, by name. Lengths (frames, points, time) may differ between recordings and between the arrays of one;
height, width, channels and the count of numbers are the same in all recordings. Only arrays that a branch in use reads
are required (``settings.sensors.BRANCHES``).

    sensor      array          shape                       dtype          unit                       nominal rate
    visible     visible        (frames, height, width, 3)  uint8          red, green, blue; 0 to 255   30 per second
    infrared    infrared       (frames, height, width)     float, uint16  see below                     9 per second
                cooling_curve  (points,)                   float, uint16  see below                     1 per second
                plume          (frames, height, width)     float, uint16  see below                     9 per second
    kinematics  kinematics     (time, channels)            float          any, the same in all files  100 per second
    geometry    geometry       (numbers,)                  float          any, the same in all files  once

``plume`` is a crop of the infrared image around the plume, in the camera's full resolution. Numbers of geometry are
by convention range in m, azimuth and elevation in rad, and speed in m/s. The visible and the infrared camera film the
same span of time: ``dual_vision`` pairs each infrared frame with the visible frame at the same relative time.

Temperatures: float16, float32 or float64 are degrees Celsius, uint16 are hundredths of a kelvin (29315 is 20 °C).
Infrared frames and crops are stored in float16, with a resolution of 0.03 °C below 64 °C and 0.06 °C below 128 °C.
Channels of kinematics are by convention accelerations x, y, z in m/s² and rates of turn x, y, z in rad/s. They are not
scaled, so scale channels in other units to about the same size. The model does not know time: other rates are fine if
all recordings have the same.

``write_recordings`` writes this format; ``synthetic.export_synthetic`` writes generated recordings in it.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Any, BinaryIO, Optional, Union

import numpy

from scu_trainer.data.records import BadSample
from scu_trainer.errors import DataError
from scu_trainer.run_files import open_regular
from scu_trainer.settings.sensors import BRANCHES

MANIFEST = "manifest.jsonl"
FORMAT_HINT = (
    "such as a float array kinematics of the shape (time, channels); write_recordings in "
    "scu_trainer.data.sensors.format writes both, and help(scu_trainer.data.sensors.format) has the whole format"
)
ABSOLUTE_ZERO_CELSIUS = -273.15
MOST_LOST = 0.5
"""Largest rounding error of a channel, as a share of its standard deviation."""


@dataclass(frozen=True)
class ArrayFormat:
    """Requirements on an array. ``sensor``: the sensor that records it. ``axes``: names of its dimensions; time, if
    there is one, is first. ``allowed``: numpy dtypes in files. ``kept_as``: dtype in memory and in the cache."""

    sensor: str
    axes: tuple[str, ...]
    allowed: tuple[str, ...]
    kept_as: str
    is_temperature: bool = False


FLOATS = ("float16", "float32", "float64")
ARRAY_FORMATS = {
    "visible": ArrayFormat("visible", ("frames", "height", "width", "3"), ("uint8",), "uint8"),
    "infrared": ArrayFormat("infrared", ("frames", "height", "width"), (*FLOATS, "uint16"), "float16", True),
    "cooling_curve": ArrayFormat("infrared", ("points",), (*FLOATS, "uint16"), "float32", True),
    "kinematics": ArrayFormat("kinematics", ("time", "channels"), FLOATS, "float32"),
    "plume": ArrayFormat("infrared", ("frames", "height", "width"), (*FLOATS, "uint16"), "float16", True),
    "geometry": ArrayFormat("geometry", ("numbers",), FLOATS, "float32"),
}


@dataclass(frozen=True)
class Recording:
    """``arrays``: arrays by name, as in the file. ``missing``: sensors or arrays that it lacks. ``split``: None if not
    given. ``report``: a short text about it, or None."""

    arrays: dict[str, numpy.ndarray]
    label: Union[int, str]
    missing: tuple[str, ...] = ()
    split: Optional[str] = None
    report: Optional[str] = None


UNREADABLE = (
    OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile, zlib.error, RuntimeError, MemoryError, TokenError,
)  # fmt: skip
"""RuntimeError: of zipfile, for an encrypted file or an unknown compression. MemoryError: for an absurd shape.
TokenError: of numpy, for the header of an array."""


def array_names(branches: Sequence[str]) -> list[str]:
    """Return the arrays that these branches read, in the order of ``ARRAY_FORMATS``."""
    return [name for name in ARRAY_FORMATS if any(name in BRANCHES[branch] for branch in branches)]


def present_arrays(names: Iterable[str], missing: Sequence[str]) -> list[str]:
    """Return those of the arrays ``names`` that are not in ``missing``, which may name arrays or sensors."""
    return [name for name in names if name not in missing and ARRAY_FORMATS[name].sensor not in missing]


ZIP, NPY = b"PK", b"\x93NUMPY"
"""The first bytes of .npz and .npy files."""


# -- reading -----------------------------------------------------------------------------------------------------------


def read_arrays(path: Path, names: Sequence[str]) -> dict[str, numpy.ndarray]:
    """Return the arrays of a .npz, checked and converted: axes as by ``with_time_first``, temperatures in degrees
    Celsius. Raises BadSample, which does not name the file."""
    try:
        # Opened here, because numpy leaves its own file open if the archive is damaged.
        with open_regular(path) as file:
            _require_numpy(file)
            archive = numpy.load(file, allow_pickle=False)
            arrays = _select(archive, names)
    except FileNotFoundError:
        raise BadSample("missing file", "the file does not exist") from None
    except UNREADABLE as error:
        raise BadSample("unreadable file", f"not a readable .npz: {error}") from error
    absent = [name for name in names if name not in arrays]
    if absent:
        sensor = ARRAY_FORMATS[absent[0]].sensor
        lacked = absent[0] if any(ARRAY_FORMATS[name].sensor == sensor for name in arrays) else sensor
        raise BadSample(
            "missing branch",
            f"it has no array {absent[0]!r} (its arrays: {', '.join(archive.files[:10]) or 'none'}), and the manifest "
            "does not declare it; "
            f'write "missing": ["{lacked}"] in its row if the recording lacks {lacked}',
        )
    return {name: _convert(name, array) for name, array in arrays.items()}


def _require_numpy(file: BinaryIO) -> None:
    """Raise BadSample for another kind of file (a table), which numpy takes for a pickle and advises to load."""
    if not file.read(len(NPY)).startswith((ZIP, NPY)):
        raise BadSample(
            "unreadable file", f"not a readable .npz but a file of another kind; give named arrays, {FORMAT_HINT}"
        )
    file.seek(0)


def _select(archive: Any, names: Sequence[str]) -> dict[str, numpy.ndarray]:
    if not isinstance(archive, numpy.lib.npyio.NpzFile):
        raise BadSample("no .npz file", "it is a single .npy array; give a .npz with named arrays")
    with archive:
        return {name: archive[name] for name in names if name in archive.files}


def _convert(name: str, array: numpy.ndarray) -> numpy.ndarray:
    """Check ``array``, and convert it to the unit, dtype and order of axes that the rest of the package uses."""
    form = ARRAY_FORMATS[name]
    wanted = f"({', '.join(form.axes)}{',' if len(form.axes) == 1 else ''})"
    if array.dtype.name not in form.allowed:
        raise BadSample("wrong dtype", f"{name} is {array.dtype.name}; allowed: {', '.join(form.allowed)}")
    channels_fit = form.axes[-1] != "3" or array.shape[-1:] == (3,)
    if array.ndim != len(form.axes) or not channels_fit:
        raise BadSample("wrong shape", f"{name} has shape {array.shape}; it must be {wanted}")
    if 0 in array.shape:
        raise BadSample("no content", f"{name} has shape {array.shape}, so it is empty; declare the branch missing")
    if array.dtype.name != "uint8":
        array = _convert_numbers(name, array, form)
    return numpy.ascontiguousarray(with_time_first(name, array))


def with_time_first(name: str, array: numpy.ndarray) -> numpy.ndarray:
    """Put the axes in the order of the cache: visible (frames, 3, height, width), geometry (1, numbers)."""
    if name == "visible":
        return array.transpose(0, 3, 1, 2)
    return array[None] if name == "geometry" else array


def _convert_numbers(name: str, array: numpy.ndarray, form: ArrayFormat) -> numpy.ndarray:
    if array.dtype.name == "uint16":
        array = array.astype("float32") / 100 + ABSOLUTE_ZERO_CELSIUS
    with numpy.errstate(over="ignore"):  # an overflow is refused below
        kept = array.astype(form.kept_as)
    wrong = ~numpy.isfinite(kept)
    if wrong.any():
        raise _not_storable(name, array, tuple(int(index) for index in numpy.argwhere(wrong)[0]), form)
    if form.is_temperature and float(array.min()) < ABSOLUTE_ZERO_CELSIUS:
        raise BadSample(
            "wrong unit", f"{name} has {float(array.min()):g} °C, below absolute zero; floats are degrees Celsius"
        )
    if name == "kinematics" and array.dtype.name == "float64":
        _require_resolved(name, array, kept)
    return kept


def _require_resolved(name: str, array: numpy.ndarray, kept: numpy.ndarray) -> None:
    """Raise BadSample for a channel that loses its variation by rounding, such as seconds since 1970."""
    spread, lost = array.std(axis=0), numpy.abs(array - kept).max(axis=0)
    is_constant = numpy.ptp(array, axis=0) <= 16 * numpy.spacing(numpy.abs(array).max(axis=0))  # up to float64 rounding
    blurred = numpy.flatnonzero((lost > MOST_LOST * spread) & ~is_constant)
    if len(blurred):
        channel = int(blurred[0])
        value, step = float(array[0, channel]), float(numpy.spacing(numpy.abs(kept[:, channel]).max()))
        raise BadSample(
            "lost in rounding",
            f"channel {channel} of {name} has values such as {value:.10g}, which {kept.dtype.name}, the type it is "
            f"stored in, resolves in steps of {step:g}, too coarse for how much it changes; subtract its first value; "
            "if it is a time stamp, leave it out, because the model does not use time",
        )


def _not_storable(name: str, array: numpy.ndarray, place: tuple[int, ...], form: ArrayFormat) -> BadSample:
    value = f"{name}{list(place)} is {array[place]}"
    if not numpy.isfinite(array[place]):
        return BadSample("not finite", f"{value}; all values must be finite numbers")
    most = f"{float(numpy.finfo(form.kept_as).max):g}{' °C' if form.is_temperature else ''}"
    return BadSample("too large", f"{value}, too large for {form.kept_as}, the type it is stored in; at most {most}")


@dataclass
class SharedShapes:
    """The shape after its time axis that each array must have, taken from the first recording that has the array.
    ``agreeing``, ``others``: numbers of accepted and refused recordings."""

    of: dict[str, tuple[int, ...]] = field(default_factory=dict)
    learned_from: dict[str, str] = field(default_factory=dict)
    agreeing: int = 0
    others: int = 0
    example: str = ""

    def check(self, arrays: dict[str, numpy.ndarray], place: str) -> None:
        """Raise BadSample if an array has another shape than the first with its name."""
        for name, array in arrays.items():
            shape = array.shape[1:]
            first = self.of.get(name, shape)
            if shape != first:
                self.others += 1
                self.example = (
                    f"{name} has {_shape_of(name, shape)}, and {self.learned_from[name]} has {_shape_of(name, first)}"
                )
                raise BadSample("another shape", f"{self.example}; all recordings must agree")
        self.agreeing += 1
        for name, array in arrays.items():  # after all checks: shapes are taken only from a recording that is used
            self.of.setdefault(name, array.shape[1:])
            self.learned_from.setdefault(name, place)

    def require_majority(self) -> None:
        """Raise DataError if most recordings were refused, because then the first recordings are the odd ones."""
        if self.others > self.agreeing:
            raise DataError(
                f"{self.others:,} of {self.others + self.agreeing:,} recordings have another shape than earlier "
                f"ones: {self.example}; remove the odd ones from the manifest"
            )


def _shape_of(name: str, shape: tuple[int, ...]) -> str:
    unit = {"kinematics": "channels", "geometry": "numbers"}.get(name)
    return f"frames of {shape[-2]} x {shape[-1]}" if unit is None else f"{shape[0]} {unit}"


# -- writing -----------------------------------------------------------------------------------------------------------


def write_recordings(folder: Path, recordings: Iterable[Recording]) -> int:
    """Write ``recordings`` one by one in the format of this module, and return their number. Arrays are written
    unchanged, so uint8 frames must have their colours in the last dimension."""
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    with open(folder / MANIFEST, "w", encoding="utf-8") as manifest:
        for count, recording in enumerate(recordings, start=1):
            name = f"{count - 1:06d}.npz"
            numpy.savez_compressed(folder / name, **recording.arrays)
            manifest.write(json.dumps(_row(name, recording)) + "\n")
    return count


def _row(name: str, recording: Recording) -> dict:
    row = {"file": name, "label": recording.label, "split": recording.split, "missing": list(recording.missing)}
    row["report"] = recording.report
    return {key: value for key, value in row.items() if value not in (None, [])}
