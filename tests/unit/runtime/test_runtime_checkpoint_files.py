"""Checkpoints as files: what torch and safetensors read of them and they of those, and what verify notices."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from msrun.errors import CheckpointError
from msrun.runtime import export_checkpoint, load_checkpoint, save_checkpoint
from msrun.runtime.checkpoint.cli import main
from msrun.runtime.checkpoint.directory import read_manifest
from msrun.runtime.checkpoint.index import SAFETENSORS, read_safetensors

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]


class Odd(nn.Module):
    """Tensors of all kinds: tied, empty, without dimensions, not row by row, of many types."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.tied = self.weight
        self.columns = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("step", torch.tensor(seed))
        for dtype in TYPES:
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.randn(7).to(dtype))


def equal(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Odd, Path]:
    network = Odd(1)
    network.weight.grad = torch.ones(3, 5)
    optimizer = torch.optim.Adam([network.weight], 0.1)
    optimizer.step()
    return network, save_checkpoint(network, tmp_path / "a.ckpt", optimizer, step_num=7)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_gives_the_state_dict_and_nothing_else(saved: tuple[Odd, Path], mmap: bool) -> None:
    network, path = saved
    state = torch.load(path, weights_only=True, mmap=mmap)
    assert {*state} == {*network.state_dict()}
    assert all(equal(state[name], value) for name, value in network.state_dict().items())
    assert state["tied"].data_ptr() == state["weight"].data_ptr(), "tied tensors are one in the file too"
    other = Odd(2)
    other.load_state_dict(state)
    assert equal(other.columns, network.columns)


def test_other_programs_find_no_fault_in_the_zip_file(saved: tuple[Odd, Path]) -> None:
    with zipfile.ZipFile(saved[1]) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("integrated", [True, False])
def test_tensors_of_all_kinds_come_back(tmp_path: Path, integrated: bool) -> None:
    network, other = Odd(1), Odd(2)
    path = save_checkpoint(network, tmp_path / "a", integrated_save=integrated)
    load_checkpoint(path, other)
    assert all(equal(value, network.state_dict()[name]) for name, value in other.state_dict().items())
    whole = load_checkpoint(path)
    assert all(equal(whole[name], value) for name, value in network.state_dict().items())


def test_file_cut_off_anywhere_is_no_checkpoint(saved: tuple[Odd, Path]) -> None:
    size = saved[1].stat().st_size
    for length in (size - 1, size - 30, size // 2, 10, 0):
        os.truncate(saved[1], length)
        assert read_manifest(saved[1]) is None
        with pytest.raises(CheckpointError, match=r"is no complete checkpoint: load another|cannot be read: .*archive"):
            load_checkpoint(saved[1], Odd())


def test_files_of_torch_save_load_too(tmp_path: Path) -> None:
    network, other = Odd(1), Odd(2)
    torch.save(network.state_dict(), tmp_path / "plain.pt")
    assert load_checkpoint(tmp_path / "plain.pt", other)["step_num"] == 0
    assert equal(other.weight, network.weight)
    torch.save({"model": network.state_dict()}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match="holds no dict of tensors"):
        load_checkpoint(tmp_path / "nested.pt", other)
    with pytest.raises(CheckpointError, match="exists and is no checkpoint: it is left alone"):
        save_checkpoint(network, tmp_path / "plain.pt")


# -- safetensors --------------------------------------------------------------------------------------------------


def test_exported_file_is_read_by_the_package_and_by_load_checkpoint(saved: tuple[Odd, Path]) -> None:
    network, path = saved
    (file,) = export_checkpoint(path, path.with_name("model.safetensors"))
    read = safetensors.torch.load_file(file)
    assert all(equal(read[name], value) for name, value in network.state_dict().items())
    other = Odd(2)
    load_checkpoint(file, other)
    assert equal(other.columns, network.columns)
    assert equal(load_checkpoint(file)["of_complex64"], network.of_complex64)  # type: ignore[arg-type]


def test_export_writes_into_pipes_and_the_targets_of_links(saved: tuple[Odd, Path], tmp_path: Path) -> None:
    network, path = saved
    fifo, link, target, read = tmp_path / "fifo", tmp_path / "link", tmp_path / "target", list[bytes]()
    os.mkfifo(fifo)
    link.symlink_to(target)
    reader = threading.Thread(target=lambda: read.append(fifo.read_bytes()))
    reader.start()
    export_checkpoint(path, fifo)
    export_checkpoint(path, link)
    reader.join()
    assert fifo.is_fifo() and link.is_symlink()
    assert read == [target.read_bytes()]
    assert equal(safetensors.torch.load_file(target)["columns"], network.columns)


def test_file_of_the_package_is_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in SAFETENSORS.values()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    (index,) = read_safetensors(tmp_path / "theirs.safetensors")
    assert {key[1]: stored.dtype for key, stored in index.items()} == {n: value.dtype for n, value in tensors.items()}
    found = load_checkpoint(tmp_path / "theirs.safetensors")
    assert all(equal(found[name], value) for name, value in tensors.items())


def test_shards_and_their_index_are_hugging_faces(saved: tuple[Odd, Path]) -> None:
    network, path = saved
    *files, index = export_checkpoint(path, path.with_name("model.safetensors"), max_shard_size="100B")
    content = json.loads(index.read_text())
    assert index.name == "model.safetensors.index.json"
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    assert {*content["weight_map"]} == {*network.state_dict()}
    for name, file in content["weight_map"].items():
        assert equal(safetensors.torch.load_file(path.with_name(file))[name], network.state_dict()[name])
    other = Odd(2)
    load_checkpoint(index, other)
    assert equal(other.columns, network.columns)


@pytest.mark.parametrize("size", ["5 parsecs", "", 0, -1, True, "0GB"])
def test_sizes_that_are_none_are_refused(saved: tuple[Odd, Path], size: object) -> None:
    with pytest.raises(CheckpointError, match="must be a number of bytes, such as 5GB"):
        export_checkpoint(saved[1], saved[1].with_name("x.safetensors"), max_shard_size=size)  # type: ignore[arg-type]


def test_type_that_the_format_does_not_know_is_refused(tmp_path: Path) -> None:
    path = save_checkpoint(nn.Linear(2, 2).to(torch.complex128), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weight is torch\.complex128, which safetensors does not know"):
        export_checkpoint(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 8, b"\x02\0\0\0\0\0\0\0[]", b"\x05\0\0\0\0\0\0\0{'a':"])
def test_damaged_safetensors_give_one_line(tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(damage)
    with pytest.raises(CheckpointError, match="is no complete safetensors file"):
        load_checkpoint(tmp_path / "x.safetensors")


# -- the command --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("integrated", [True, False])
def test_verify_names_what_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str], integrated: bool) -> None:
    network = nn.Linear(64, 64)
    path = save_checkpoint(network, tmp_path / "a", integrated_save=integrated)
    assert main(["verify", str(path)]) == 0
    assert "all checksums are right" in capsys.readouterr().out
    file = path if integrated else path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    place = content.index(network.weight.detach().numpy().tobytes()[:64])
    content[place] ^= 1
    file.write_bytes(content)
    assert main(["verify", str(path)]) == 1
    name = "model.weight" if integrated else "__0_0.distcp"
    assert f"{name} is damaged" in capsys.readouterr().err


def test_inspect_says_what_is_in_a_checkpoint(saved: tuple[Odd, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved[1])]) == 0
    said = capsys.readouterr().out
    assert "file with whole tensors, written by 1 rank on" in said
    assert "after step 7, 0 epochs done" in said
    assert "optimizer.weight.exp_avg  " in said
    assert main(["inspect", "--json", str(saved[1])]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["position"] == {"epoch": 0, "step_in_epoch": 0, "step": 7}
    found = {tensor["name"]: (tensor["shape"], tensor["dtype"]) for tensor in content["tensors"]}
    assert found["model.columns"] == ([6, 4], "float32")


def test_merge_and_export_do_what_the_functions_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network, other = Odd(1), Odd(2)
    path = save_checkpoint(network, tmp_path / "parts", integrated_save=False)
    assert main(["merge", str(path), str(tmp_path / "whole.ckpt")]) == 0
    other.load_state_dict(torch.load(tmp_path / "whole.ckpt"))
    assert equal(other.columns, network.columns)
    assert main(["export", str(path), str(tmp_path / "m.safetensors"), "--max-shard-size", "1MB"]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'm.safetensors'}\n"


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ([], 2, "Missing command; see msrun-checkpoint --help"),
        (["inspect", "nowhere"], 1, "there is no checkpoint"),
        (["verify", "nowhere"], 1, "there is no checkpoint"),
        (["frobnicate"], 2, "No such command"),
        (["merge", "nowhere"], 2, "Missing argument 'FILE'"),
        (["export", "nowhere", "x"], 1, "there is no checkpoint"),
        (["transform", "nowhere", "x", "--strategy", "none.json"], 1, "there is no checkpoint"),
    ],
)
def test_wrong_input_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(words) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("msrun-checkpoint: error: ")
    assert text in line
