"""Copies between the memories of the host and of this rank's device: started now, waited for later, counted.

On an accelerator both directions have a stream of their own and the host's side is pinned, so that a copy passes beside
what is computed. Where the device is the CPU, a copy is a clone.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from msrun.runtime import world
from msrun.runtime.execute.tensor_future import TensorFuture
from msrun.runtime.execute.traffic import traffic

HOST = torch.device("cpu")


def start_copy(value: Tensor, *, to_host: bool) -> TensorFuture:
    """Copy a tensor to the memory of the host, or of this rank's device. Nobody may write to it before the wait."""
    traffic.add_copy("to_host" if to_host else "to_device", value)
    accelerator = value.device if to_host else world.device()
    if accelerator.type == "cpu":
        return TensorFuture(value.clone())
    devices = torch.get_device_module(accelerator.type)
    stream = _stream(accelerator, to_host=to_host)
    with devices.device(accelerator):
        if to_host:
            stream.wait_stream(devices.current_stream(accelerator))
        with devices.stream(stream):
            if to_host:
                copied = torch.empty_like(value, device=HOST, pin_memory=True).copy_(value, non_blocking=True)
                value.record_stream(stream)
            else:
                copied = value.to(accelerator, non_blocking=True)
            return _Copying(value, copied, stream.record_event())


class _Copying(TensorFuture):
    """A tensor that a stream is copying."""

    def __init__(self, source: Tensor, copied: Tensor, event: Any) -> None:
        super().__init__(copied)
        self._source: Tensor | None = source
        self._event = event

    def wait(self) -> Tensor:
        """Return the copy: on the host when it has arrived, on a device for whatever its stream computes next."""
        if self._source is not None:
            if self._value.device.type == "cpu":
                self._event.synchronize()
            else:
                current = torch.get_device_module(self._value.device.type).current_stream(self._value.device)
                current.wait_event(self._event)
                self._value.record_stream(current)
            self._source = None
        return self._value


@functools.cache
def _stream(accelerator: torch.device, *, to_host: bool) -> Any:  # noqa: ARG001 - one stream for each direction
    return torch.get_device_module(accelerator.type).Stream(accelerator)
