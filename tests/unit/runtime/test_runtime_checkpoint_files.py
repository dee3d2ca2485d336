"""Checkpoints as files and directories: what other programs read, what counts as complete, what goes and what stays."""

import itertools
import json
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from msrun.errors import CheckpointError
from msrun.runtime import export_checkpoint, load_checkpoint, save_checkpoint
from msrun.runtime.checkpoint.cli import main
from msrun.runtime.checkpoint.directory import (
    MANIFEST,
    Manifest,
    Position,
    choose_surplus,
    complete_directory,
    find_checkpoints,
    give_name,
    read_manifest,
    recover,
    recover_all,
    remove_checkpoint,
    start_writing,
    sweep,
)
from msrun.runtime.checkpoint.index import SAFETENSORS, read_safetensors

TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool]


class Odd(nn.Module):
    """Tensors of all kinds: tied, empty, without dimensions, not row by row, of many types."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(3, 5))
        self.tied = self.weight
        self.columns = nn.Parameter(torch.randn(4, 6).t())
        self.register_buffer("none", torch.empty(0, 4))
        self.register_buffer("step", torch.tensor(seed))
        for dtype in TYPES:
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.randn(7).to(dtype))


def equal(first, second):
    return first.shape == second.shape and torch.equal(
        first.contiguous().reshape(-1).view(torch.uint8), second.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.fixture
def saved(tmp_path):
    network = Odd(1)
    network.weight.grad = torch.ones(3, 5)
    optimizer = torch.optim.Adam([network.weight], 0.1)
    optimizer.step()
    return network, save_checkpoint(network, tmp_path / "a.ckpt", optimizer, step_num=7)


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_gives_the_state_dict_and_nothing_else(saved, mmap):
    network, path = saved
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
    state = torch.load(path, weights_only=True, mmap=mmap)
    assert {*state} == {*network.state_dict()}
    assert all(equal(state[name], value) for name, value in network.state_dict().items())
    assert state["tied"].data_ptr() == state["weight"].data_ptr(), "tied tensors are one in the file too"


@pytest.mark.parametrize("integrated", [True, False])
def test_tensors_of_all_kinds_come_back(tmp_path, integrated):
    network, other = Odd(1), Odd(2)
    path = save_checkpoint(network, tmp_path / "a", integrated_save=integrated)
    load_checkpoint(path, other)
    assert all(equal(value, network.state_dict()[name]) for name, value in other.state_dict().items())
    whole = {name: value for name, value in load_checkpoint(path).items() if isinstance(value, Tensor)}
    assert {*whole} == {*network.state_dict()}
    assert all(equal(whole[name], value) for name, value in network.state_dict().items())


def test_file_cut_off_anywhere_is_no_checkpoint(saved):
    size = saved[1].stat().st_size
    for length in (size - 1, size - 30, size // 2, 10, 0):
        os.truncate(saved[1], length)
        assert read_manifest(saved[1]) is None
        with pytest.raises(CheckpointError, match=r"is no complete checkpoint: load another|cannot be read: .*archive"):
            load_checkpoint(saved[1], Odd())


def test_files_of_torch_save_load_too(tmp_path):
    network, other = Odd(1), Odd(2)
    torch.save(network.state_dict(), tmp_path / "plain.pt")
    assert load_checkpoint(tmp_path / "plain.pt", other)["step_num"] == 0
    assert equal(other.weight, network.weight)
    torch.save({"model": network.state_dict()}, tmp_path / "nested.pt")
    with pytest.raises(CheckpointError, match="holds no dict of tensors"):
        load_checkpoint(tmp_path / "nested.pt", other)
    with pytest.raises(CheckpointError, match="exists and is no checkpoint: it is left alone"):
        save_checkpoint(network, tmp_path / "plain.pt")


def test_exported_file_is_read_by_the_package_and_by_load_checkpoint(saved):
    network, path = saved
    (file,) = export_checkpoint(path, path.with_name("model.safetensors"))
    read = safetensors.torch.load_file(file)
    assert all(equal(read[name], value) for name, value in network.state_dict().items())
    other = Odd(2)
    load_checkpoint(file, other)
    assert equal(other.columns, network.columns)
    assert equal(load_checkpoint(file)["of_complex64"], network.of_complex64)


def test_export_writes_into_pipes_and_the_targets_of_links(saved, tmp_path):
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


def test_file_of_the_package_is_read(tmp_path):
    tensors = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in SAFETENSORS.values()}
    safetensors.torch.save_file(tensors, tmp_path / "theirs.safetensors", {"format": "pt"})
    (index,) = read_safetensors(tmp_path / "theirs.safetensors")
    assert {key[1]: stored.dtype for key, stored in index.items()} == {n: value.dtype for n, value in tensors.items()}
    found = load_checkpoint(tmp_path / "theirs.safetensors")
    assert all(equal(found[name], value) for name, value in tensors.items())


def test_shards_and_their_index_are_hugging_faces(saved):
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


def test_sizes_and_types_that_safetensors_does_not_know_are_refused(saved, tmp_path):
    for size in ("5 parsecs", "", 0, -1, True, "0GB"):
        with pytest.raises(CheckpointError, match="must be a number of bytes, such as 5GB"):
            export_checkpoint(saved[1], tmp_path / "b", max_shard_size=size)
    path = save_checkpoint(nn.Linear(2, 2).to(torch.complex128), tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"weight is torch\.complex128, which safetensors does not know"):
        export_checkpoint(path, tmp_path / "b")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("integrated", [True, False])
def test_verify_names_what_is_damaged(tmp_path, capsys, integrated):
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


def test_inspect_says_what_is_in_a_checkpoint(saved, capsys):
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


def test_merge_and_export_do_what_the_functions_do(tmp_path, capsys):
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
        ("", 2, "Missing command; see msrun-checkpoint --help"),
        ("inspect nowhere", 1, "there is no checkpoint"),
        ("verify nowhere", 1, "there is no checkpoint"),
        ("frobnicate", 2, "No such command"),
        ("merge nowhere", 2, "Missing argument 'FILE'"),
        ("export nowhere x", 1, "there is no checkpoint"),
        ("transform nowhere x --strategy none.json", 1, "there is no checkpoint"),
    ],
)
def test_wrong_input_is_one_line(capsys, words, status, text):
    assert main(words.split()) == status
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("msrun-checkpoint: error: ")
    assert text in line


def write(final, content=b"x" * 100, position=None):
    """Write a small checkpoint as save_checkpoint does."""
    temporary, serial = start_writing(final, is_file=False)
    (temporary / "data").write_bytes(content)
    complete_directory(temporary, Manifest(position or Position(), 4, serial, time.time()))
    give_name(temporary, final)
    return final


def names(directory, prefix=None):
    return [path.name for path, _ in find_checkpoints(directory, prefix)]


def test_written_checkpoint_says_what_it_is_and_takes_the_place_of_an_interrupted_one(tmp_path):
    temporary, _ = start_writing(tmp_path / "new" / "a", is_file=False)
    (temporary / "__7_0.distcp").write_bytes(b"of a rank that is no more")
    (tmp_path / "new" / "a").mkdir()  # an empty directory may become one
    final = write(tmp_path / "new" / "a", position=Position(2, 3, 19))
    manifest = read_manifest(final)
    assert manifest is not None
    assert (manifest.position, manifest.world_size, manifest.serial) == (Position(2, 3, 19), 4, 1)
    assert manifest.files == {"data": 100}
    assert os.listdir(tmp_path / "new") == ["a"]
    assert sorted(os.listdir(final)) == [MANIFEST, "data"]


def test_checkpoint_has_no_name_before_it_is_finished(tmp_path):
    write(tmp_path / "a")
    temporary, _ = start_writing(tmp_path / "b", is_file=False)
    (temporary / "data").write_bytes(b"half")
    assert names(tmp_path) == ["a"]
    shutil.copy(tmp_path / "a" / MANIFEST, temporary)
    (temporary / "data").write_bytes(b"x" * 100)
    assert read_manifest(temporary) is None, "whatever is in it"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data", None),
        ("data", b"x" * 99),
        ("data", b"x" * 101),
        (MANIFEST, None),
        (MANIFEST, b"{}"),
        (MANIFEST, b'{"format_version": 2, "fi'),
    ],
)
def test_damaged_checkpoint_and_other_things_are_not_found(tmp_path, name, content):
    (tmp_path / "file.ckpt").write_text("MindSpore's")
    (tmp_path / "folder").mkdir()
    write(tmp_path / "a")
    broken = write(tmp_path / "b") / name
    assert names(tmp_path) == ["a", "b"]
    broken.unlink()
    if content is not None:
        broken.write_bytes(content)
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "missing") == []


def test_newest_was_written_last_whatever_name_and_clock_say(tmp_path, monkeypatch):
    clock = iter([500.0, 100.0, 300.0])
    monkeypatch.setattr("time.time", lambda: next(clock))
    for name, step in (("CKP-9_1.ckpt", 90), ("CKP-10_1.ckpt", 100), ("CKP-1_1.ckpt", 1)):
        write(tmp_path / name, position=Position(step=step))
    assert names(tmp_path) == ["CKP-9_1.ckpt", "CKP-10_1.ckpt", "CKP-1_1.ckpt"]


def test_prefix_finds_its_own_only(tmp_path):
    for name in ("a-1_1.ckpt", "a-1_2.ckpt", "ab-1_1.ckpt", "a-1_1", "a.b-1_1.ckpt", "aXb-1_1.ckpt"):
        write(tmp_path / name)
    assert names(tmp_path, "a") == ["a-1_1.ckpt", "a-1_2.ckpt"]
    assert names(tmp_path, "a.b") == ["a.b-1_1.ckpt"]
    assert len(names(tmp_path)) == 6


def test_what_is_no_checkpoint_is_not_replaced(tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").write_text("years")
    with pytest.raises(CheckpointError, match="home exists and is no checkpoint: it is left alone"):
        start_writing(tmp_path / "home", is_file=False)
    assert (tmp_path / "home" / "thesis.tex").exists()


def test_replaced_checkpoint_comes_back_if_its_successor_was_cut_off_between_the_renames(tmp_path):
    write(tmp_path / "last", b"old").rename(tmp_path / "last.replaced")
    assert names(tmp_path) == []
    recover_all(tmp_path)
    assert names(tmp_path) == ["last"]
    shutil.copytree(tmp_path / "last", tmp_path / "last.replaced")
    write(tmp_path / "last", b"new")
    shutil.copytree(tmp_path / "last", tmp_path / "last.replaced", dirs_exist_ok=True)
    recover(tmp_path / "last")
    assert (tmp_path / "last" / "data").read_bytes() == b"new", "not over its successor"


def test_removed_checkpoint_loses_its_name_first(tmp_path, monkeypatch):
    """A removal that is cut off leaves nothing that could be taken for a checkpoint."""
    write(tmp_path / "a")
    monkeypatch.setattr(shutil, "rmtree", lambda *_args, **_settings: None)
    remove_checkpoint(tmp_path / "a")
    assert os.listdir(tmp_path) == ["a.removing"]
    assert names(tmp_path) == []


def test_sweep_removes_what_an_interrupted_job_left_and_nothing_else(tmp_path):
    write(tmp_path / "CKP-1_1.ckpt")
    write(tmp_path / "CKP-1_2.ckpt").rename(tmp_path / "CKP-1_2.ckpt.replaced")
    for name in ("CKP-1_3.ckpt.saving", "CKP-1_4.ckpt.removing", "mine.saving", "CKP2-1_1.ckpt.saving", "CKP-x.saving"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    sweep(tmp_path, "CKP")
    assert sorted(os.listdir(tmp_path)) == sorted(
        ["CKP-1_1.ckpt", "CKP-1_2.ckpt", "mine.saving", "CKP2-1_1.ckpt.saving", "CKP-x.saving"]
    )


def test_checkpoint_of_a_later_format_is_refused_and_not_overlooked(tmp_path):
    final = write(tmp_path / "a")
    text = (final / MANIFEST).read_text()
    (final / MANIFEST).write_text(text.replace('"format_version": 2', '"format_version": 3'))
    with pytest.raises(CheckpointError, match="has format 3, this msrun reads up to 2"):
        find_checkpoints(tmp_path)


def entries(minutes):
    return [(Path(str(i)), Manifest(Position(), 1, i, minute * 60.0)) for i, minute in enumerate(minutes)]


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12).map(sorted), st.integers(1, 60))
def test_one_in_so_many_minutes_stays_and_the_newest_always(minutes, per_minutes):
    found = entries(minutes)
    assert choose_surplus(found, 0, 0) == [], "nothing limits it"
    surplus = choose_surplus(found, 0, per_minutes)
    kept = [manifest.saved_at / 60 for path, manifest in found if path not in surplus]
    assert kept[-1] == minutes[-1]
    assert all(later - earlier >= per_minutes for earlier, later in itertools.pairwise(kept[:-1]))
    for path in surplus:
        minute = minutes[int(path.name)]
        assert any(0 <= minute - earlier < per_minutes for earlier in kept), "an older one stands for it"
