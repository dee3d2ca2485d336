"""Checkpoints that somebody else has made to do harm: one line, and nothing that they hold is run."""

import ast
import json
import os
import pickle
import struct
import zipfile
import zlib
from pathlib import Path

import pytest
import torch
from asked_cases import every_third_fast
from torch import nn

import msrun
from msrun.errors import CheckpointError
from msrun.runtime import load_checkpoint, save_checkpoint
from msrun.runtime.checkpoint.cli import main


class Runs:
    """A pickle of it makes a file where an ordinary unpickler loads it."""

    def __reduce__(self):
        return os.mkdir, ("it_ran",)


def save_directory(path):
    network = nn.Linear(4, 4)
    network.weight.grad, network.bias.grad = torch.ones(4, 4), torch.ones(4)
    optimizer = torch.optim.Adam(network.parameters())
    optimizer.step()
    return save_checkpoint(network, path, optimizer, integrated_save=False)


def put(path, name, content):
    """Replace a file, and what the manifest says of it."""
    (path / name).write_bytes(content)
    change_manifest(path, {name: len(content)}, {name: zlib.crc32(content)})


def change_manifest(path, files, checksums, **values):
    manifest = json.loads((path / "checkpoint.json").read_text()) | values
    for key, more in (("files", files), ("checksums", checksums)):
        manifest[key] = {name: value for name, value in (manifest[key] | more).items() if value is not None}
    (path / "checkpoint.json").write_text(json.dumps(manifest))


def change_index(change):
    def damage(path):
        tensors = json.loads((path / "tensors.json").read_text())
        put(path, "tensors.json", json.dumps(change(tensors) or tensors).encode())

    return damage


def change_part(**values):
    return change_index(lambda tensors: tensors[0]["parts"][0].update(values))


def without_index(damage):
    """Damage a directory of an earlier version, which has `.metadata` alone."""

    def remove_index(path):
        (path / "tensors.json").unlink()
        change_manifest(path, {"tensors.json": None}, {"tensors.json": None})
        damage(path)

    return remove_index


def change_metadata(change):
    def damage(path):
        found = pickle.loads((path / ".metadata").read_bytes())
        put(path, ".metadata", pickle.dumps(change(found) or found))

    return damage


def lead_out(path):
    file = next(path.glob("*.distcp"))
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def set_places(**values):
    def change(metadata):
        for place in metadata.storage_data.values():
            vars(place).update(values)

    return change


def set_size(shape):
    def change(metadata):
        tensor = metadata.state_dict_metadata["model.weight"]
        tensor.size = torch.Size(shape)
        tensor.chunks[0].sizes = torch.Size(shape)

    return change


def nest_keys(path):
    """A dictionary whose key is a tuple in a tuple, and so on."""
    put(path, ".metadata", b"\x80\x04}(" + b")" + b"\x85" * 200_000 + b"Nu.")


def name_memory(path):
    """A place in the unpickler's memory for which C's would take 64 GB."""
    put(path, ".metadata", b"\x80\x04N" + b"r" + struct.pack("<I", 0xF0000000) + b".")


DIRECTORIES = {
    "index leads up": change_part(file="../elsewhere"),
    "index names a path": change_part(file="/etc/passwd"),
    "index names a folder": change_part(file="."),
    "index names no text": change_part(file=5),
    "link leads out": lead_out,
    "part is negative": change_part(offset=-1),
    "part is too long": change_part(length=1 << 40),
    "part is not whole": change_part(offset=0.0),
    "part has no place": change_index(lambda tensors: tensors[0]["parts"][0].pop("file")),
    "box is outside": change_part(offsets=[3, 3]),
    "box is flat": change_part(sizes=[16], offsets=[0]),
    "box is large": change_part(sizes=[1 << 40, 1 << 40]),
    "shape is negative": change_index(lambda tensors: tensors[0].update(shape=[-1, 4])),
    "shape is large": change_index(lambda tensors: tensors[0].update(shape=[1 << 60, 1 << 60])),
    "type is a function": change_index(lambda tensors: tensors[0].update(dtype="load")),
    "key is short": change_index(lambda tensors: tensors[0].update(key=["model"])),
    "tensor is there twice": change_index(lambda tensors: tensors * 2),
    "index is a number": lambda path: put(path, "tensors.json", b"5"),
    "index is deep": lambda path: put(path, "tensors.json", b"[" * 100_000 + b"]" * 100_000),
    "index is cut off": lambda path: put(path, "tensors.json", b'[{"key": ["mod'),
    "metadata runs": without_index(lambda path: put(path, ".metadata", pickle.dumps(Runs()))),
    "metadata runs inside": without_index(change_metadata(lambda found: setattr(found, "planner_data", Runs()))),
    "metadata is a number": without_index(lambda path: put(path, ".metadata", pickle.dumps(5))),
    "metadata is cut off": without_index(lambda path: put(path, ".metadata", b"\x80\x04")),
    "metadata names memory": without_index(name_memory),
    "metadata has deep keys": without_index(nest_keys),
    "metadata leads up": without_index(change_metadata(set_places(relative_path="../elsewhere"))),
    "metadata names a path": without_index(change_metadata(set_places(relative_path="/etc/passwd"))),
    "metadata is negative": without_index(change_metadata(set_places(offset=-5))),
    "metadata is too long": without_index(change_metadata(set_places(length=1 << 40))),
    "metadata is large": without_index(change_metadata(set_size((1 << 40, 1 << 20)))),
    "manifest leads up": lambda path: put(path, "../elsewhere", b"x"),
    "manifest has text for numbers": lambda path: change_manifest(path, {}, {}, saved_at="now"),
}


@pytest.mark.parametrize(
    "damage", every_third_fast(DIRECTORIES.values()), ids=[name.replace(" ", "_") for name in DIRECTORIES]
)
def test_directory_that_says_what_cannot_be_is_one_line_and_runs_nothing(tmp_path, monkeypatch, capsys, damage):
    monkeypatch.chdir(tmp_path)
    path = save_directory(tmp_path / "evil.ckpt")
    damage(path)
    for words in (["verify"], ["inspect"], ["merge", "out.ckpt"], ["export", "out.safetensors"]):
        assert main([words[0], str(path), *words[1:]]) == 1, words
        lines = capsys.readouterr().err.splitlines()
        assert all(line.startswith("msrun-checkpoint: ") and len(line) < 1000 for line in lines)
        assert len(lines) == 1 or words == ["verify"], lines
    with pytest.raises(CheckpointError, match=r"; load another one|load one that|give another one|none$"):
        load_checkpoint(path, nn.Linear(4, 4))
    assert not list(tmp_path.glob("out*"))
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: put(path, ".metadata", pickle.dumps(Runs())),
        change_metadata(set_places(offset=7)),
        change_metadata(lambda found: found.state_dict_metadata.popitem() and None),
    ],
    ids=["runs", "other_places", "other_tensors"],
)
def test_metadata_beside_an_index_is_not_read_but_not_called_right_either(tmp_path, monkeypatch, capsys, damage):
    monkeypatch.chdir(tmp_path)
    path = save_directory(tmp_path / "evil.ckpt")
    damage(path)
    assert main(["verify", str(path)]) == 1
    assert ".metadata is damaged: " in capsys.readouterr().err
    for words in (["inspect"], ["merge", "out.ckpt"], ["export", "out.safetensors"]):
        assert main([words[0], str(path), *words[1:]]) == 0
    load_checkpoint(path, nn.Linear(4, 4))
    assert not (tmp_path / "it_ran").exists()


def test_verify_finds_parts_that_make_no_whole(tmp_path, capsys):
    path = save_directory(tmp_path / "a")
    assert main(["verify", str(path)]) == 0
    change_index(lambda tensors: tensors[0].update(shape=[8, 4]))(path)
    assert main(["verify", str(path)]) == 1
    assert main(["merge", str(path), str(tmp_path / "out")]) == 1
    assert "parts of model.weight are missing" in capsys.readouterr().err.splitlines()[-1]


def test_directories_of_earlier_versions_and_of_torch_load(tmp_path):
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    path = save_directory(tmp_path / "earlier")
    whole = load_checkpoint(path)
    without_index(lambda _: None)(path)
    found = load_checkpoint(path)
    assert all(torch.equal(found[name], whole[name]) for name in ("weight", "bias"))
    assert main(["verify", str(path)]) == 0
    state = {"weight": torch.randn(4, 4).t(), "bias": torch.randn(4)}
    for name, saved in (("flat", state), ("nested", {"model": state, "optimizer": {"lr": 0.1, "steps": [1, 2]}})):
        save(saved, storage_writer=FileSystemWriter(tmp_path / name), no_dist=True)
        network = nn.Linear(4, 4)
        load_checkpoint(tmp_path / name, network)
        assert torch.equal(network.weight, state["weight"])
        assert torch.equal(network.bias, state["bias"])


def tensor_file(header, values=bytes(16)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + values


def one(**item):
    return tensor_file({"weight": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16], **item}})


SAFETENSORS = {
    "deep": tensor_file(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "shape is negative": one(shape=[-1], data_offsets=[4, 0]),
    "shapes are negative": one(shape=[-2, -2]),
    "shape is large": one(shape=[1 << 62, 0, 1 << 62], data_offsets=[0, 0]),
    "shape is no list": one(shape=4),
    "shape is a fraction": one(shape=[4.0]),
    "place is negative": one(data_offsets=[-16, 0]),
    "place is behind the end": one(data_offsets=[16, 32]),
    "tensors lie upon each other": tensor_file(
        {str(number): {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for number in range(2)}
    ),
    "nothing": b"",
    "is cut off": b"\x05\0\0\0\0\0\0\0{'a':",
    "header is a list": tensor_file([]),
    "header is long": struct.pack("<Q", 1 << 62) + bytes(16),
    "header is longer than the file": struct.pack("<Q", 1 << 20) + bytes(16),
    "name is long": tensor_file({"a" * 100_000: 5}),
}


@pytest.mark.parametrize("content", SAFETENSORS.values(), ids=[name.replace(" ", "_") for name in SAFETENSORS])
def test_impossible_header_of_safetensors_is_one_line(tmp_path, capsys, content):
    (tmp_path / "a.safetensors").write_bytes(content)
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("; give another one")
    assert len(line) < 1000


def test_index_of_safetensors_opens_files_of_its_folder(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "outside.bin").write_bytes(one())
    (folder / "link.safetensors").symlink_to("../outside.bin")
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.bin", str(tmp_path / "outside.bin"), "link.safetensors", "x/../../outside.bin", "", 5):
        index.write_text(json.dumps({"weight_map": {"weight": name}}))
        assert main(["inspect", str(index)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "is no index of safetensors files" in line
    index.write_text('{"weight_map":' + "[" * 100_000)
    assert main(["inspect", str(index)]) == 1
    (folder / "a.safetensors").write_bytes(one())
    index.write_text(json.dumps({"weight_map": {"weight": "a.safetensors"}}))
    assert main(["inspect", str(index)]) == 0


def test_links_of_hugging_faces_cache_lead_to_its_blobs(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "5f3a", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "cafe").write_bytes(one())
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/cafe")
    index = snapshot / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"weight": "model-1.safetensors"}}))
    assert torch.equal(load_checkpoint(index)["weight"], torch.zeros(4))


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """Write a zip file anew."""
    with zipfile.ZipFile(path) as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            archive.writestr(name, change(name, content))


@pytest.mark.parametrize(
    "key_and_value",
    [
        "offset -1",
        f"offset {1 << 62}",
        "shape [-1]",
        f"shape {[1 << 40, 1 << 40]}",
        'dtype "load"',
        'dtype ["x"]',
        "key 5",
    ],
)
def test_file_whose_index_says_what_cannot_be_is_one_line(tmp_path, capsys, key_and_value):
    def change(name, content):
        if not name.endswith("/tensors.json"):
            return content
        places, (key, value) = json.loads(content), key_and_value.split(" ", 1)
        places["model.weight"][key] = json.loads(value)
        return json.dumps(places).encode()

    path = save_checkpoint(nn.Linear(4, 4), tmp_path / "a.ckpt")
    rewrite(path, change)
    for words in (["verify"], ["inspect"], ["merge", str(tmp_path / "b")], ["export", str(tmp_path / "c")]):
        assert main([words[0], str(path), *words[1:]]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "cannot be read: " in line


def test_values_that_name_functions_are_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "a.pt"
    for content in ({"weight": Runs()}, Runs()):
        torch.save(content, file)
        assert main(["inspect", str(file)]) == 1
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(file, nn.Linear(4, 4))
    for state in (Runs(), {"appended": Runs()}, 5, {"extra": {}, "appended": [], "optimizer": 5, "random": {}}):
        path = save_checkpoint(nn.Linear(4, 4), tmp_path / "a.ckpt", integrated_save=False)
        torch.save(state, path / "state.pt")
        put(path, "state.pt", (path / "state.pt").read_bytes())
        assert main(["verify", str(path)]) == 1
        assert main(["merge", str(path), "out"]) == 1
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_checkpoint(path, nn.Linear(4, 4))
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("is_ours", [True, False])
def test_compressed_files_are_refused_because_they_may_be_of_any_size(tmp_path, is_ours):
    file = tmp_path / "a.ckpt"
    if is_ours:
        save_checkpoint(nn.Linear(4, 4), file)
    else:
        torch.save({"weight": torch.zeros(1000)}, file)
    rewrite(file, lambda _, content: content, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match=r"cannot be read: it is compressed|is no complete checkpoint"):
        load_checkpoint(file)


def test_names_cannot_write_to_the_terminal(tmp_path, capsys):
    header = {"\x1b]0;x\x07\nb": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}
    (tmp_path / "a.safetensors").write_bytes(tensor_file(header))
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith(r"  model.\x1b]0;x\x07\nb ")


def test_pickles_are_read_by_the_two_ways_that_run_nothing():
    package = Path(msrun.__file__).parent
    readers = {
        *("pickle.load", "pickle.loads", "pickle.Unpickler", "pickle._Unpickler", "torch.load", "torch.jit.load"),
        *("FileSystemReader", "dcp.load", "torch.distributed.checkpoint.load"),
    }
    found = {
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if any(reader in path.read_text() for reader in readers)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in readers
    }
    of_the_user_alone = {"launch/function.py", "runtime/capture/graph_pickle.py"}  # in folders that nobody else writes
    assert found - of_the_user_alone == {"runtime/inert_pickle.py", "runtime/checkpoint/index.py"}
