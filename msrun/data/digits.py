"""Real handwritten digits without a download, in the files and the look of MNIST.

scikit-learn carries 1797 digits of 8x8 pixels, values 0..16, from the "Optical Recognition of Handwritten Digits"
data set (E. Alpaydin, C. Kaynak, 1998, UCI Machine Learning Repository). `write_digits` enlarges them to 20x20,
centres them in 28x28 as MNIST does, and writes the four idx files.

    python -m msrun.data.digits DIR
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import secrets
import shutil
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from msrun.data.mnist import KINDS, PREFIX_OF_USAGE, find_mnist_file, read_idx, write_idx
from msrun.data.stored_file import write_files
from msrun.errors import DataError, MsrunError

NUM_TRAIN = 1536
NUM_TEST = 261
IMAGE_EDGE = 28
CIFAR_EDGE = 32
INNER_EDGE = 20

_SOURCE_EDGE = 8
_FULL_SCALE = 16 * 10 * 10  # the brightest pixel, after weights in tenths in both directions
_PERMUTATION_SEED = 20
_SHAPES = {
    (usage, kind): (count, *((IMAGE_EDGE, IMAGE_EDGE) if num_dims == 3 else ()))
    for usage, count in (("train", NUM_TRAIN), ("test", NUM_TEST))
    for kind, num_dims in KINDS
}


def write_digits(directory: str | os.PathLike[str]) -> Path:
    """Write the digits to `directory` unless they are there, and return it, ready for `MnistDataset`.

    1536 train and 261 test images (28, 28) uint8 in 0..255 and labels uint8, always the same bytes. Any number of
    processes may call this at once: files appear whole, and everybody returns only when all four are there.

    Raises:
        DataError: scikit-learn is missing, or the folder holds other data under these names.
    """
    folder = Path(directory)
    if not _find_missing(folder):
        return folder
    arrays = build_digits()
    temporary = folder.parent / f".{folder.name}.{secrets.token_hex(6)}"
    try:
        temporary.mkdir(parents=True)
        for key, array in arrays.items():
            write_idx(temporary / _name(*key), array)
        _move_into_place(temporary, folder)
    except OSError as error:
        raise DataError(f"{folder}: cannot write the digits ({error.strerror or error}); use another folder") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def write_digits_as_cifar10(directory: str | os.PathLike[str]) -> Path:
    """Write the digits to `directory` as CIFAR-10's binary files unless they are there, ready for `Cifar10Dataset`.

    1536 train and 261 test images of 32x32 pixels, grey, labels 0..9, always the same bytes. Any number of processes
    may call this at once.

    Raises:
        DataError: scikit-learn is missing, or the folder cannot be written.
    """
    folder = Path(directory)
    parts = {f"data_batch_{number + 1}.bin": ("train", number) for number in range(5)}
    parts["test_batch.bin"] = ("test", 0)
    if all((folder / name).is_file() for name in parts):
        return folder
    digits = build_digits()
    edge = (CIFAR_EDGE - IMAGE_EDGE) // 2
    contents = {}
    for name, (usage, number) in parts.items():
        rows = slice(None) if usage == "test" else slice(number * NUM_TRAIN // 5, (number + 1) * NUM_TRAIN // 5)
        images = np.pad(digits[usage, "images"][rows], ((0, 0), (edge, edge), (edge, edge)))
        planes = np.repeat(images.reshape(len(images), 1, -1), 3, axis=1).reshape(len(images), -1)
        contents[name] = np.concatenate([digits[usage, "labels"][rows][:, None], planes], axis=1).tobytes()
    write_files(folder, "the digits", contents)
    return folder


def build_digits() -> dict[tuple[str, str], np.ndarray]:
    """Return {("train" or "test", "images" or "labels"): array}; raises DataError when scikit-learn is missing."""
    package = importlib.util.find_spec("sklearn")  # not imported: with scipy that is seconds of CPU on every rank
    if package is None or package.origin is None:
        raise DataError(
            "the handwritten digits need scikit-learn, which is not installed; run: pip install scikit-learn"
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    try:
        table = np.loadtxt(path, delimiter=",", dtype=np.uint8).reshape(NUM_TRAIN + NUM_TEST, _SOURCE_EDGE**2 + 1)
    except (OSError, ValueError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); run: pip install --force-reinstall scikit-learn") from error
    order = np.random.RandomState(_PERMUTATION_SEED).permutation(NUM_TRAIN + NUM_TEST)
    images = table[:, :-1].reshape(-1, _SOURCE_EDGE, _SOURCE_EDGE)
    arrays = {"images": enlarge(images)[order], "labels": table[:, -1][order]}
    rows = {"train": slice(NUM_TRAIN), "test": slice(NUM_TRAIN, None)}
    return {(usage, kind): arrays[kind][rows[usage]] for usage, kind in _SHAPES}


def enlarge(images: np.ndarray) -> np.ndarray:
    """(n, 8, 8) values 0..16 -> (n, 28, 28) uint8 0..255: bilinear to 20x20 with a margin of 4.

    In integers, so that the bytes do not depend on the machine.
    """
    weights = _bilinear_weights()
    inner = weights @ images.astype(np.int64) @ weights.T
    rounded = (inner * 255 * 2 + _FULL_SCALE) // (2 * _FULL_SCALE)
    margin = (IMAGE_EDGE - INNER_EDGE) // 2
    return np.pad(rounded.astype(np.uint8), ((0, 0), (margin, margin), (margin, margin)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the digits to the folder named on the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m msrun.data.digits", description="Write handwritten digits as MNIST's four files."
    )
    parser.add_argument("directory", help="folder to write the four idx files to")
    try:
        folder = write_digits(parser.parse_args(arguments).directory)
    except MsrunError as error:
        sys.stderr.write(f"digits: error: {error}\n")
        return error.exit_code
    sys.stdout.write(f"{folder}: {NUM_TRAIN} train and {NUM_TEST} test digits\n")
    return 0


def _bilinear_weights() -> np.ndarray:
    """Return (20, 8) int64 in tenths: row i mixes the two source pixels next to the centre of target pixel i.

    That centre is at (i + 1/2) * 8/20 - 1/2 = (4 i - 3) / 10 source pixels.
    """
    centres = np.clip(4 * np.arange(INNER_EDGE) - 3, 0, 10 * (_SOURCE_EDGE - 1))
    return np.clip(10 - np.abs(centres[:, None] - 10 * np.arange(_SOURCE_EDGE)), 0, None)


def _find_missing(folder: Path) -> list[tuple[str, str]]:
    """Return which of the four are not there; raise DataError when one is there but holds something else."""
    missing = []
    for key, shape in _SHAPES.items():
        path = find_mnist_file(folder, *key, num_dims=len(shape))
        if path is None:
            missing.append(key)
        elif (found := read_idx(path, should_map=True).shape) != shape:
            raise DataError(f"{path}: holds shape {found}, not the digits' {shape}; write the digits to another folder")
    return missing


def _move_into_place(temporary: Path, folder: Path) -> None:
    """Move the whole folder in one step, or file by file when the target exists and is not empty."""
    try:
        temporary.rename(folder)
    except OSError:
        folder.mkdir(exist_ok=True)
        for key in _find_missing(folder):
            (temporary / _name(*key)).replace(folder / _name(*key))


def _name(usage: str, kind: str) -> str:
    return f"{PREFIX_OF_USAGE[usage]}-{kind}-idx{len(_SHAPES[usage, kind])}-ubyte"


if __name__ == "__main__":
    sys.exit(main())
