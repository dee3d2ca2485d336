"""What training holds in memory: weights, gradients and optimizer state, counted from the tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch.optim import Optimizer

from msrun.runtime.optim.host_steps import find_offload
from msrun.runtime.optim.host_weights import MASTER, Copies, held_gradient, local_gradient, tensor_bytes

MIB = 1 << 20


@dataclass(frozen=True)
class MemoryOf:
    """Bytes on one side."""

    weights: int = 0
    """On the host: the wide copies."""
    gradients: int = 0
    """That are held at this moment."""
    state: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.weights + self.gradients + self.state


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of this rank; `str()` is a table."""

    elements: int
    """Of this rank's parts of the parameters."""
    device: MemoryOf
    host: MemoryOf
    copied: Copies
    """For the last step."""

    def __str__(self) -> str:
        rows = [("", "device", "host")]
        for name in ("weights", "gradients", "state", "total"):
            device, host = (_words(getattr(side, name), self.elements) for side in (self.device, self.host))
            rows.append((name, device, host))
        rows.append(("copied in a step", _mib(self.copied.to_device), _mib(self.copied.to_host)))
        return "\n".join(f"{name:<18}{device:<28}{host}".rstrip() for name, device, host in rows)


def memory_of(optimizer: Optimizer) -> OptimizerMemory:
    """Return what the training of an optimizer's parameters holds on this rank, and what its last step has copied.

    Gradients are those held now: call it between the backward pass and `zero_grad()`. Where the device is the CPU,
    device and host are counted apart all the same.
    """
    host = find_offload(optimizer)
    chosen = host.chosen(optimizer) if host is not None else set()
    sides = [[0, 0, 0], [0, 0, 0]]
    elements = 0
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        on_host = id(parameter) in chosen
        sides[0][0] += tensor_bytes(parameter)
        elements += tensor_bytes(parameter) // parameter.element_size()
        if host is not None:
            sides[on_host][0] += host.weights.copy_bytes(parameter)
        gradient = local_gradient(parameter)
        if gradient is not None:
            sides[held_gradient(parameter) is not None][1] += tensor_bytes(gradient)
        state = optimizer.state.get(parameter, {})
        sides[on_host][2] += sum(tensor_bytes(value) for key, value in state.items() if key != MASTER)
    return OptimizerMemory(
        elements, MemoryOf(*sides[0]), MemoryOf(*sides[1]), host.last_step if host is not None else Copies()
    )


def _words(count: int, elements: int) -> str:
    return f"{_mib(count)} ({count / elements:.2f} B/element)" if elements else _mib(count)


def _mib(count: int) -> str:
    return f"{count / MIB:.2f} MiB"
