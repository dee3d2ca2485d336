"""scikit-learn's digits as MNIST files, written once by any number of processes."""

from __future__ import annotations

import hashlib
import multiprocessing
import subprocess
import sys

import numpy as np
import pytest
from asked_cases import one_fast

from msrun.errors import DataError
from msrun.runtime.data import MnistDataset, digits, read_idx, write_idx

FILE_NAMES = [f"{part}-{kind}-ubyte" for part in ("t10k", "train") for kind in ("images-idx3", "labels-idx1")]
DEADLINE_S = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return digits.write_digits(tmp_path_factory.mktemp("parent") / "sub" / "digits")


@pytest.mark.slow
def test_the_files_look_like_mnist(folder):
    assert sorted(path.name for path in folder.iterdir()) == FILE_NAMES
    assert [path.name for path in folder.parent.iterdir()] == ["digits"]
    images = read_idx(folder / "train-images-idx3-ubyte")
    assert (images.shape, images.dtype, images.min(), images.max()) == ((1536, 28, 28), np.uint8, 0, 255)
    margin = images.copy()
    margin[:, 4:24, 4:24] = 0
    assert not margin.any()
    assert 0.1 < images.mean() / 255 < 0.2
    assert (len(MnistDataset(folder, "train")), len(MnistDataset(folder, "test"))) == (1536, 261)
    for usage in ("train", "test"):
        assert {int(label) for _, label in MnistDataset(folder, usage)} == set(range(10))


def test_the_digits_can_be_told_apart_by_the_nearest_mean(folder):
    images, labels = (read_idx(folder / name).astype(float) for name in ("train-images-idx3-ubyte", FILE_NAMES[3]))
    test_images, test_labels = (read_idx(folder / name).astype(float) for name in FILE_NAMES[:2])
    means = np.stack([images[labels == digit].mean(axis=0).ravel() for digit in range(10)])
    distances = ((test_images.reshape(261, 1, 784) - means) ** 2).sum(axis=2)
    assert (distances.argmin(axis=1) == test_labels).mean() > 0.85


def test_enlarging_mixes_neighbours_and_keeps_flat_areas():
    flat = digits.enlarge(np.full((1, 8, 8), 16.0))
    assert (flat[0, 4:24, 4:24] == 255).all()
    edge = digits.enlarge(np.tile([0.0] * 4 + [16.0] * 4, (1, 8, 1)))[0, 10, 4:24]
    assert edge.tolist() == [0] * 9 + [77, 179] + [255] * 9


def test_the_bytes_are_pinned(folder):
    content = b"".join((folder / name).read_bytes() for name in FILE_NAMES)
    assert hashlib.sha256(content).hexdigest() == "397642db178a2356c5fe520af3e71eecb8a0c506c1bb5f4acee97f8b78b4dfe7"


def test_a_complete_folder_is_left_alone(folder):
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert digits.write_digits(str(folder)) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


def test_a_missing_file_is_added_beside_what_is_there(folder, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_idx(tmp_path / FILE_NAMES[0], read_idx(folder / FILE_NAMES[0]))
    digits.write_digits(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["notes.txt", *FILE_NAMES]
    assert (tmp_path / FILE_NAMES[3]).read_bytes() == (folder / FILE_NAMES[3]).read_bytes()


def test_other_data_under_these_names_is_never_overwritten(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte.gz", np.zeros((5, 28, 28), np.uint8))
    with pytest.raises(DataError, match=r"holds shape \(5, 28, 28\), not the digits' \(1536, 28, 28\)"):
        digits.write_digits(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1


def test_a_target_that_cannot_be_a_folder_is_a_data_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot write the digits"):
        digits.write_digits(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("is_existing", one_fast(*(False, True)))
def test_eight_processes_at_once_leave_one_complete_set(folder, tmp_path, is_existing):
    target = tmp_path / "digits"
    if is_existing:
        target.mkdir()
        (target / "notes.txt").write_text("mine")
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(8)
    processes = [context.Process(target=write_together, args=(barrier, target)) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(DEADLINE_S)
    assert [process.exitcode for process in processes] == [0] * 8
    assert [path.name for path in tmp_path.iterdir()] == ["digits"]
    assert sorted(path.name for path in target.glob("t*")) == FILE_NAMES
    for name in FILE_NAMES:
        assert (target / name).read_bytes() == (folder / name).read_bytes()


def write_together(barrier, target):
    barrier.wait(DEADLINE_S)
    digits.write_digits(target)
    for usage in ("train", "test"):
        MnistDataset(target, usage)


def test_missing_scikit_learn_is_told_with_the_remedy(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert digits.main([str(tmp_path / "digits")]) == 1
    assert "need scikit-learn, which is not installed; run: pip install scikit-learn\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_module_runs_as_a_program(folder):
    command = [sys.executable, "-m", "msrun.runtime.data.digits", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{folder}: 1536 train and 261 test digits\n"
