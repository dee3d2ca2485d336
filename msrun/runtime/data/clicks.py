"""Made-up click logs in Criteo's format, with clicks that can be predicted from their columns.

Every category has values of its own, some frequent and most rare, and every value a weight; the chance of a click is
the sigmoid of the weights and of the integers. The same bytes always come out.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import numpy as np

from msrun.errors import DataError
from msrun.runtime.data.criteo import NUM_CATEGORIES, NUM_INTEGERS

NUM_TRAIN, NUM_TEST = 16384, 4096
_SEED = 1314
_EMPTY = 0.05
"""Share of columns without a value."""
_RATE = -2.2
"""Score of an average sample: about a quarter of them are clicks."""


def write_clicks(directory: str | os.PathLike[str], num_train: int = NUM_TRAIN, num_test: int = NUM_TEST) -> Path:
    """Write `train.txt` and `test.txt` to `directory` unless they are there, and return it, for `CriteoDataset`.

    Any number of processes may call this at once: files appear whole.

    Raises:
        DataError: the folder cannot be written to.
    """
    folder = Path(directory)
    parts = {"train.txt": (0, num_train), "test.txt": (1, num_test)}
    missing = {name: part for name, part in parts.items() if not (folder / name).is_file()}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, (part, count) in missing.items():
            temporary = folder / f".{name}.{secrets.token_hex(6)}"
            temporary.write_bytes(b"\n".join(_lines(part, count)) + b"\n")
            temporary.replace(folder / name)
    except OSError as error:
        raise DataError(f"{folder}: cannot write click logs ({error.strerror or error}); use another folder") from error
    return folder


def _lines(part: int, count: int) -> list[bytes]:
    world = np.random.RandomState(_SEED)  # the same in both parts: only its samples differ
    sizes = np.geomspace(4, 3000, NUM_CATEGORIES).astype(int)
    weights = [world.normal(0, 0.5, size) for size in sizes]
    hashes = [world.randint(0, 2**32, size, dtype=np.uint64) for size in sizes]
    of_integers = world.normal(0, 0.35, NUM_INTEGERS)
    draw = np.random.RandomState(_SEED + 1 + part)
    scores = np.full(count, _RATE)
    columns = []
    for weight in of_integers:
        values = np.floor(draw.lognormal(1.0, 1.2, count)).astype(int) - 1
        is_empty = draw.rand(count) < _EMPTY
        scores += np.where(is_empty, 0, weight * np.log1p(np.maximum(values, 0)))
        columns.append([b"" if empty else b"%d" % value for value, empty in zip(values, is_empty, strict=True)])
    for weight, names in zip(weights, hashes, strict=True):
        values = np.minimum((len(names) ** draw.rand(count)).astype(int) - 1, len(names) - 1)  # the first ones most
        is_empty = draw.rand(count) < _EMPTY
        scores += np.where(is_empty, 0, weight[values])
        texts = [b"%08x" % int(name) for name in names]
        columns.append([b"" if empty else texts[value] for value, empty in zip(values, is_empty, strict=True)])
    clicks = draw.rand(count) < 1 / (1 + np.exp(-scores))
    columns.insert(0, [b"1" if click else b"0" for click in clicks])
    return [b"\t".join(row) for row in zip(*columns, strict=True)]
