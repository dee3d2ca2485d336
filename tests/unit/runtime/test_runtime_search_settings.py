"""For which device strategies are searched."""

from __future__ import annotations

import pytest
import torch

from msrun import contract
from msrun.runtime import world
from msrun.runtime.parallel.settings import SearchSettings


def searched_for(settings: SearchSettings) -> str:
    return settings.spec().device.name


def test_a_search_is_for_the_device_of_this_process_or_for_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert searched_for(SearchSettings("dynamic_programming")) == "cpu"
    monkeypatch.setattr(world, "device", lambda: torch.device("cuda", 0))
    for name, profile in {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200", "Tesla T4": "a100"}.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert searched_for(SearchSettings("dynamic_programming")) == profile


def test_a_dry_run_searches_for_the_device_that_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.MSRUN_SIM_LEVEL, "1")
    monkeypatch.setenv(contract.MSRUN_SIM_DEVICE, "h100")
    assert searched_for(SearchSettings("dynamic_programming")) == "h100"
