"""Versions of packages by the names of their metadata's folders."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from msrun.agent.host.host_facts import installed_version


@pytest.mark.parametrize("package", ["torch", "numpy", "psutil"])
def test_versions_are_those_that_importlib_finds(package: str) -> None:
    assert installed_version(package) == importlib.metadata.version(package)


def test_first_place_on_the_path_counts_and_longer_names_are_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("one/torchvision-9.0.dist-info", "one/torch_npu-9.1.dist-info", "two/torch-2.1.0+cpu.dist-info"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "three/torch-3.0.dist-info").mkdir(parents=True)
    (tmp_path / "archive.zip").write_bytes(b"")
    names = ("gone", "archive.zip", "one", "two", "three")
    monkeypatch.setattr("sys.path", [str(tmp_path / name) for name in names])
    assert installed_version("torch") == "2.1.0+cpu"


def test_package_without_such_a_folder_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "old.egg-info").mkdir()
    (tmp_path / "old.egg-info" / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: old\nVersion: 0.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_version("old") == "0.7"
    assert installed_version("no_such_package") == ""
