"""A plain torch program says on the progress board that it joins the world."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from msrun import contract
from msrun.agent.processes import child as module
from msrun.agent.watch.progress_board import ProgressBoard


@pytest.fixture
def board(board_of_rank_1: ProgressBoard) -> ProgressBoard:
    return board_of_rank_1


def rendezvous() -> tuple[ModuleType, list[tuple[Any, ...]]]:
    """Return a module as torch's, whose one handler notes what it is called with."""
    calls: list[tuple[Any, ...]] = []

    def meet(*words: Any, **settings: Any) -> Iterator[Any]:
        calls.append((*words, settings))
        return iter(())

    made = ModuleType(module.RENDEZVOUS)
    made._rendezvous_handlers = {"env": meet}  # type: ignore[attr-defined]
    return made, calls


def phases(board: ProgressBoard) -> list[int]:
    return [board.read(rank).phase for rank in range(3)]


@pytest.mark.parametrize(
    ("url", "is_told"),
    [
        ("env://", True),
        ("env://?rank=1&world_size=3", True),
        ("tcp://h:1?rank=0&world_size=2", False),
    ],
)
def test_meeting_of_the_whole_world_is_told_and_goes_on(
    board: ProgressBoard, monkeypatch: pytest.MonkeyPatch, url: str, is_told: bool
) -> None:
    torchs, calls = rendezvous()
    monkeypatch.setitem(sys.modules, module.RENDEZVOUS, torchs)
    module.watch_joining()
    torchs._rendezvous_handlers["env"](url, 7, timeout=9)
    assert calls == [(url, 7, {"timeout": 9})]
    told = contract.PHASE_PLAIN_TORCH if is_told else contract.PHASE_UNKNOWN
    assert phases(board) == [contract.PHASE_UNKNOWN, told, contract.PHASE_UNKNOWN]


def test_record_that_the_runtime_keeps_is_left_alone(board: ProgressBoard) -> None:
    from msrun.runtime.progress import ProgressRecord

    ProgressRecord(str(board._path), 1).enter_phase(contract.PHASE_JOINED)
    module._tell()
    assert board.read(1).phase == contract.PHASE_JOINED


@pytest.mark.parametrize("name", [contract.MSRUN_PROGRESS, contract.RANK, contract.WORLD_SIZE])
def test_program_that_has_removed_a_variable_meets_all_the_same(
    board: ProgressBoard, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    torchs, calls = rendezvous()
    monkeypatch.setitem(sys.modules, module.RENDEZVOUS, torchs)
    module.watch_joining()
    monkeypatch.delenv(name)
    torchs._rendezvous_handlers["env"]("env://")
    assert len(calls) == 1 and phases(board) == [contract.PHASE_UNKNOWN] * 3


def test_torch_that_is_imported_later_is_watched_from_then_on_and_only_once(
    board: ProgressBoard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, played_import: Callable[[str], ModuleType]
) -> None:
    (tmp_path / "played_rendezvous.py").write_text("_rendezvous_handlers = {'env': lambda url: iter(())}\n")
    monkeypatch.setattr(module, "RENDEZVOUS", "played_rendezvous")
    before = list(sys.meta_path)
    module.watch_joining()
    assert len(sys.meta_path) == len(before) + 1
    played_import("contextlib")
    torchs = played_import("played_rendezvous")
    assert sys.meta_path == before
    torchs._rendezvous_handlers["env"]("env://")
    assert board.read(1).phase == contract.PHASE_PLAIN_TORCH


@pytest.fixture
def played_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Imports a module from the test's folder as if for the first time."""
    import importlib

    monkeypatch.syspath_prepend(str(tmp_path))

    def load(name: str) -> ModuleType:
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, None)
            monkeypatch.delitem(sys.modules, name)
        return importlib.import_module(name)

    return load
