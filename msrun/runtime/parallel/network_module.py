"""A network behind AutoParallel as users and libraries see it: its own class, names and methods, whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from msrun.errors import StrategyError
from msrun.runtime.agreement import meetings
from msrun.runtime.nn.with_loss import WithLoss
from msrun.runtime.parallel.batch.divided_batch import DividedBatch
from msrun.runtime.parallel.modes.own_gradients import is_layerwise
from msrun.runtime.parts.on_servers import find_remote
from msrun.runtime.parts.part import Part


class ForwardOf:
    """A method `forward` with the signature of the network's, in which libraries look for the names of columns."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self.__doc__ = forward.__doc__

    def __get__(self, step: NetworkModule | None, owner: type) -> Callable[..., Any]:
        if step is None:
            return self._forward
        bound: Any = partial(self._forward, step)
        if isinstance(step.network, nn.Module):
            bound.__signature__ = inspect.signature(step.network.forward)  # dynamo would run what is __wrapped__
        return bound


class NetworkModule(nn.Module):
    """A module with the submodules, names, training flag, methods and class of the network that it runs.

    `isinstance(step, PreTrainedModel)` is what it is of the network, and `step.config` is the network's: libraries that
    ask find what they expect.
    """

    network: Callable[..., Any]
    _is_accelerate_prepared = True
    """What accelerate, and with it transformers' Trainer, asks before they wrap a model in DDP: this one needs none."""
    accepts_loss_kwargs = False
    """Whether Trainer gives the network the number of tokens by which it divides its loss: a step counts those of all
    ranks itself."""

    def __init__(self, network: Callable[..., Any]) -> None:
        if isinstance(network, nn.Module) and _holds_parallel(network):
            raise StrategyError("AutoParallel of a network that holds an AutoParallel: wrap the whole network, once")
        super().__init__()
        vars(self)["network"] = network  # no submodule: that would put its name before every parameter's
        if isinstance(network, nn.Module):
            share_tables(self, network)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the network without its wrappers, beside its own: what isinstance and libraries ask."""
        network = vars(self).get("network")
        return type(unwrap(network)) if isinstance(network, nn.Module) else type(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return object.__new__, (type(self),), vars(self)  # pickle would take `__class__`

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the network; `generate` and `save_pretrained` run with whole parameters."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            network = vars(self).get("network")
            if not isinstance(network, nn.Module) or name.startswith("__"):
                raise
        found = getattr(unwrap(network), name)
        return partial(self._call_whole, found) if name in ("generate", "save_pretrained") else found

    def _call_whole(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the network that needs whole parameters. All ranks call it together."""
        raise NotImplementedError

    @property
    def _is_placed(self) -> bool:
        """True when the network's tensors may not change their types and devices any more."""
        return False

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the network, without the wrappers around it, and its modules under the user's names."""
        for name, module in super().named_modules(memo, prefix, remove_duplicate):
            yield name, unwrap(self.network) if module is self and isinstance(self.network, nn.Module) else module

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the network's parameters under the user's names; after the first call each holds this rank's part."""
        self._module("parameters")
        return super().named_parameters(prefix, recurse, remove_duplicate)

    @property
    def training(self) -> bool:
        """The network's training flag."""
        network = vars(self).get("network")
        return unwrap(network).training if isinstance(network, nn.Module) else bool(vars(self)["training"])

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self)["training"] = mode
        network = vars(self).get("network")
        if isinstance(network, nn.Module):
            network.training = unwrap(network).training = mode

    def train(self, mode: bool = True) -> Self:
        """Set the network's training mode."""
        if isinstance(self.network, nn.Module):
            self.network.train(mode)
        return self

    def apply(self, fn: Callable[[nn.Module], None]) -> Self:
        """Apply a function to every module of the network, innermost first."""
        self._module("modules").apply(fn)
        return self

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """Return whole tensors under the user's names, on every rank. All ranks call it together.

        Args:
            keep_vars: return the network's own parameters, of which each rank may hold a part, instead.
        """
        network = self._module("state")
        words = dict(zip(("destination", "prefix", "keep_vars"), args, strict=False))
        destination, prefix = words.get("destination", destination), words.get("prefix", prefix)
        keep_vars = words.get("keep_vars", keep_vars)
        for hook in self._state_dict_pre_hooks.values():
            hook(self, prefix, keep_vars)
        if not (keep_vars or holds_whole(network.parameters())):
            meetings.gather("state_dict()")
        state = collect_state(network, destination, prefix, keep_vars=keep_vars)
        for hook in self._state_dict_hooks.values():
            hook(self, state, prefix, getattr(state, "_metadata", {}).get(prefix[:-1], {}))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load whole tensors, of which each rank takes its part; as of one process' network, under the user's names."""
        return super().load_state_dict(state_dict, strict, assign)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        network = self._module("state")
        found: list[str] = []
        unwrap(network)._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, found, error_msgs
        )
        of_losses = tuple(f"{prefix}{name}." for name in _losses(network))
        unexpected_keys += [name for name in found if not name.startswith(of_losses)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Convert or move every tensor of the network: `to`, `half`, `cuda`, ...

        Raises:
            StrategyError: a conversion after the first call, whose program reads the present types.
        """
        network = self._module("tensors")
        if self._is_placed:
            for parameter in network.parameters():
                probe = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                if (fn(probe).dtype, fn(probe).device) != (probe.dtype, probe.device):
                    raise StrategyError(
                        "to() came after the first call: the program is made for the types; do it before"
                    )
        network._apply(fn, recurse)
        return self

    def _module(self, what: str) -> nn.Module:
        if not isinstance(self.network, nn.Module):
            raise StrategyError(f"AutoParallel of a step function has no {what} of its own: ask the network")
        return self.network


def holds_whole(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether every rank has the values of all of these, so that one alone may read them."""
    return not any(
        isinstance(p, Part | DTensor) or p.is_meta or is_layerwise(p) or find_remote(p) is not None for p in parameters
    )


def _holds_parallel(network: nn.Module) -> bool:
    return isinstance(network, NetworkModule) or any(map(_holds_parallel, network.children()))


def unwrap(network: nn.Module) -> nn.Module:
    """Return a network without the wrappers that give it a loss or divide its batch."""
    while isinstance(network, WithLoss | DividedBatch | DistributedDataParallel):
        inner = "module" if isinstance(network, DistributedDataParallel) else "network"
        network = getattr(network, inner)
    return network


def share_tables(parallel: nn.Module, network: nn.Module) -> None:
    """Let a module have the submodules, parameters and buffers of another one, now and when they change."""
    inner = unwrap(network)
    for table in ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules"):
        vars(parallel)[table] = vars(inner)[table]
    losses = _losses(network)
    if losses:
        vars(parallel)["_modules"] = {**inner._modules, **losses}


def collect_state(network: nn.Module, destination: Any, prefix: str, *, keep_vars: bool) -> Any:
    """Return a network's state dict with whole tensors. All ranks call it together when parameters are cut."""
    state = unwrap(network).state_dict(destination=destination, prefix=prefix, keep_vars=True)
    for name, loss in _losses(network).items():
        loss.state_dict(destination=state, prefix=f"{prefix}{name}.", keep_vars=True)
    if not keep_vars:
        for name, value in state.items():
            if name.startswith(prefix) and isinstance(value, Tensor):
                state[name] = (value.full_tensor() if isinstance(value, Part | DTensor) else value).detach()
    return state


def _losses(network: nn.Module) -> dict[str, nn.Module]:
    """Return the loss modules of the wrappers that hold parameters or buffers."""
    found: dict[str, nn.Module] = {}
    inner = unwrap(network)
    while network is not inner:
        for name, child in network.named_children():
            is_network = name in ("network", "module")
            if not is_network and (*child.parameters(), *child.buffers()):
                found[name] = child
        network = network.module if isinstance(network, DistributedDataParallel) else network.network  # type: ignore[assignment]
    return found
