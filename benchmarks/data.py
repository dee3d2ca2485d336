"""Images a second of the CIFAR-10 pipeline of the distributed training document, beside torchvision in a DataLoader.

    python benchmarks/data.py [--workers 0 1 2] [--seconds 1.5] [--json FILE]

Pipeline: RandomCrop(32, padding 4), RandomHorizontalFlip, Resize(224), Rescale, Normalize, HWC2CHW, batches of 32; and
the same without Resize. Peers: torchvision's transforms, v1 on PIL images and v2 on tensors, in torch's DataLoader with
as many workers. All read the same random images; the sides take turns, and the best of the rounds counts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import figures
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from msrun.data import Cifar10Dataset, transforms, vision

MEAN, STD = (0.4465, 0.4822, 0.4914), (0.2010, 0.1994, 0.2023)
BATCH_SIZE = 32
RECORDS_PER_FILE = 4000
ROUNDS = 5


class Images(Dataset[Any]):
    """What torchvision's CIFAR10 gives: a PIL image and a label, through a transform."""

    def __init__(self, folder: Path, transform: Callable[[Any], Any]) -> None:
        parts = [np.fromfile(folder / f"data_batch_{i}.bin", np.uint8).reshape(-1, 3073) for i in range(1, 6)]
        records = np.concatenate(parts)
        self._pixels = np.ascontiguousarray(records[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
        self._labels = records[:, 0].astype(np.int64).tolist()
        self._transform = transform

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        return self._transform(Image.fromarray(self._pixels[index])), self._labels[index]


def write_images(folder: Path) -> None:
    """Write random images and labels as CIFAR-10's binary files."""
    numbers = np.random.RandomState(0)
    for i in range(1, 6):
        records = numbers.randint(0, 256, (RECORDS_PER_FILE, 3073)).astype(np.uint8)
        records[:, 0] %= 10
        records.tofile(folder / f"data_batch_{i}.bin")


def build_ours(folder: Path, edge: int, workers: int) -> Iterable[Any]:
    """Return the document's pipeline."""
    operations = [vision.RandomCrop((32, 32), (4, 4, 4, 4)), vision.RandomHorizontalFlip()]
    operations += [vision.Resize((edge, edge))] if edge != 32 else []
    operations += [vision.Rescale(1.0 / 255.0, 0.0), vision.Normalize(MEAN, STD), vision.HWC2CHW()]
    data_set = Cifar10Dataset(folder, num_parallel_workers=workers)
    data_set = data_set.map(operations=transforms.TypeCast(torch.int32), input_columns="label")
    data_set = data_set.map(operations=operations, input_columns="image")
    return data_set.shuffle(buffer_size=10).batch(batch_size=BATCH_SIZE, drop_remainder=True)


def build_v1(folder: Path, edge: int, workers: int) -> Iterable[Any]:
    """Return torchvision's transforms on PIL images."""
    from torchvision import transforms as v1

    resize = [v1.Resize((edge, edge))] if edge != 32 else []
    augment = [v1.RandomCrop(32, 4), v1.RandomHorizontalFlip(), *resize]
    return _loader(Images(folder, v1.Compose([*augment, v1.ToTensor(), v1.Normalize(MEAN, STD)])), workers)


def build_v2(folder: Path, edge: int, workers: int) -> Iterable[Any]:
    """Return torchvision's transforms on tensors of uint8."""
    from torchvision.transforms import v2

    resize = [v2.Resize((edge, edge))] if edge != 32 else []
    augment = [v2.ToImage(), v2.RandomCrop(32, 4), v2.RandomHorizontalFlip(), *resize]
    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    return _loader(Images(folder, v2.Compose([*augment, *to_float])), workers)


def _loader(images: Images, workers: int) -> DataLoader[Any]:
    return DataLoader(
        images, BATCH_SIZE, shuffle=True, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )


class Running:
    """A pipeline that has begun."""

    def __init__(self, batches: Iterable[Any]) -> None:
        begin = time.perf_counter()
        self._batches = batches
        self._steps = iter(batches)
        next(self._steps)
        self.first_s = time.perf_counter() - begin
        self.best = 0.0

    def run(self, seconds: float) -> None:
        """Take steps for a while and note the images a second."""
        begin, images = time.perf_counter(), 0
        while (passed := time.perf_counter() - begin) < seconds:
            step = next(self._steps, None)
            if step is None:
                self._steps = iter(self._batches)
                continue
            images += len(step[0])
            float(step[0][0, 0, 0, 0])  # as training would: touch it
        self.best = max(self.best, images / passed)


def _find_peers() -> dict[str, Callable[[Path, int, int], Iterable[Any]]]:
    sys.path.insert(0, str(figures.ROOT))
    try:
        from tests.zoo.packages import prepare_torchvision

        prepare_torchvision()
        import torchvision  # noqa: F401
    except (ImportError, AssertionError):
        print("torchvision is not installed: no peer to compare with; pip install 'msrun[zoo]'")
        return {}
    return {"v1": build_v1, "v2": build_v2}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--edges", type=int, nargs="+", default=[224, 32], help="edge of the images, 32: no Resize")
    parser.add_argument("--seconds", type=float, default=1.5, help="of each side in each round")
    figures.add_json_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = {"msrun": build_ours, **_find_peers()}
    with figures.kept(options.json), tempfile.TemporaryDirectory() as name:
        write_images(Path(name))
        print(f"{'edge':>5} {'workers':>8}" + "".join(f"{side:>12}" for side in sides) + "    images a second")
        for edge in options.edges:
            for workers in options.workers:
                running = {side: Running(build(Path(name), edge, workers)) for side, build in sides.items()}
                for _ in range(ROUNDS):
                    for side in running.values():
                        side.run(options.seconds)
                print(f"{edge:>5} {workers:>8}" + "".join(f"{side.best:>12,.0f}" for side in running.values()))
                for side, measured in running.items():
                    figures.record(
                        "pipeline",
                        side=side,
                        edge=edge,
                        workers=workers,
                        images_per_s=round(measured.best),
                        first_step=round(measured.first_s, 3),
                    )
                del running


if __name__ == "__main__":
    main()
