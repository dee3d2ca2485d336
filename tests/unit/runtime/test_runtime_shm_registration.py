"""The backend `shm` in torch's tables."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from msrun.runtime.shm.registration import register


def test_torch_does_not_hook_its_recorder_into_groups_of_shm(monkeypatch: pytest.MonkeyPatch) -> None:
    recording = {"gloo"}
    monkeypatch.setattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", recording, raising=False)
    register()
    assert recording == {"gloo", "shm"}
    assert dist.Backend.backend_capability["shm"] == ["cpu"]
