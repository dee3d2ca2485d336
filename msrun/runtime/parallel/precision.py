"""Mixed precision: compute in 16 bits under torch's autocast, keep weights, gradients and the optimizer in float32.

A captured network has the casts in its graph (`graph/autocast.py`); its weights are gathered in 16 bits. The other
modes run under `torch.autocast`. float16 needs a loss scale, or small gradients vanish: backward passes begin with it
and every gradient is divided by it before anybody sees it. When one of them is infinite on any rank, the optimizer's
step does nothing on every rank; a dynamic scale is then halved, and doubled after 2000 good steps (torch's GradScaler).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from msrun import contract
from msrun.errors import StrategyError, near_miss
from msrun.runtime import world
from msrun.runtime.execute.transfers import traffic
from msrun.runtime.progress import waiting_in
from msrun.runtime.tensors.plain_tensors import plain_tensors

Compat = Literal["torch", "mindspore"]

COMPATS = ("torch", "mindspore")
current_compat: ContextVar[Compat | None] = ContextVar("current_compat", default=None)
"""Set by set_auto_parallel_context, and by AutoParallel while it calls a network; None: the process's."""
current_loss_scale: ContextVar[float] = ContextVar("current_loss_scale", default=1.0)
"""Set by AutoParallel while it calls a network: what backward passes inside the call, of micro batches, begin with. The
gradients that they leave hold it once, as those of a backward pass after the call do."""


_defaults: list[Compat] = ["torch"]
"""What the process means last is its default."""


def choose_default_compat(compat: Compat) -> None:
    """Choose what this process means where neither the context nor an AutoParallel says it."""
    _defaults.append(compat)


def find_compat() -> Compat:
    """Return what holds here: as AutoParallel or the context says, else the environment, else the process's default."""
    compat = current_compat.get() or _defaults[-1]
    if current_compat.get() is None and compat == "mindspore":
        compat = os.environ.get(contract.MSRUN_MINDSPORE_SEMANTICS) or compat  # type: ignore[assignment]
        check_compat(compat, contract.MSRUN_MINDSPORE_SEMANTICS)
    return compat


@dataclass(frozen=True)
class Scales:
    """Factors of the loss of one part of a batch, and of its gradient."""

    loss: float
    gradient: float


def check_compat(compat: str, name: str = "compat") -> None:
    """Refuse an unknown word."""
    if compat not in COMPATS:
        raise StrategyError(f"{name}={compat!r}: must be torch (means) or mindspore (sums)")


def part_scale(compat: Compat, parts: int) -> float:
    """Return the factor of every part's loss, and so of its gradient."""
    return 1.0 / parts if compat == "torch" else 1.0


def scales(compat: Compat, copies: int, micro_batches: int) -> Scales:
    """Return the factors for a batch of so many copies in each of so many micro batches."""
    of_copies = part_scale(compat, copies)
    return Scales(of_copies * part_scale(compat, micro_batches), of_copies / micro_batches)


def describe(compat: Compat) -> str:
    """Return the choice in words, for the first log line."""
    if compat == "torch":
        return "losses are means over the global batch (torch)"
    return "losses of copies are added up (MindSpore)"


def result_factor(parts: int) -> float:
    """Return the factor of the gradient that comes in at a result of a captured step that is cut into so many parts."""
    return 1.0 / parts


def input_factor(parts: int) -> float:
    """Return the factor of the gradient that a captured step hands on to an input that is cut into so many parts."""
    return float(parts)


def leaf_factor(parts: int) -> float:
    """Return the factor of what has arrived at a leaf of which each of so many parts of the ranks has its own."""
    return 1.0 / parts


@dataclass(frozen=True)
class ReplicaScales:
    """Factors of a mode without capture, in which the gradients of whole parameters are averaged over the ranks."""

    start: float
    """Of the gradient with which every rank's backward pass begins."""
    own: float
    """Of gradients that are this rank's alone, of its inputs and of layerwise_parallel parameters, in the end."""

    @property
    def input(self) -> float:
        """Of the gradient that a step hands on to an input, where it is again that of the rank's own loss."""
        return 1.0 / self.start

    @property
    def leaf(self) -> float:
        """Of what has arrived at a leaf that is this rank's alone."""
        return self.own * self.start


def replica_scales(compat: Compat, averages: bool, ranks: int) -> ReplicaScales:
    """Return the factors that make gradients those of the mean (or sum) of the ranks' losses.

    A rank's own gradient counts what its loss, and through communication operators the others', change: it is that of
    the sum of the losses. MindSpore leaves it so also where it averages the others.
    """
    if averages:
        return ReplicaScales(1.0, 1.0 / ranks if compat == "torch" else 1.0)
    return ReplicaScales(float(ranks), 1.0 / ranks)


def describe_replicas(averages: bool) -> str:
    """Return in words what happens to the gradients of the ranks, for the first log line."""
    if averages:
        return "gradients are means over the ranks (torch)"
    return "gradients are added up over the ranks (MindSpore's gradients_mean=False)"


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def scale_gradient(value: Tensor, factor: float) -> Tensor:
    """Return a value whose gradient is multiplied on its way back."""
    if factor == 1.0 or not value.requires_grad or not torch.is_grad_enabled():
        return value
    scaled: Tensor = _ScaleGradient.apply(value, factor)
    return scaled


_TYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
INITIAL_SCALE = 2.0**16
GOOD_STEPS = 2000
DYNAMIC = "dynamic"


@dataclass(frozen=True)
class PrecisionSpec:
    """Settings of `AutoParallel.mixed_precision`."""

    dtype: str
    loss_scale: float | str | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _TYPES:
            raise StrategyError(
                f"mixed_precision({self.dtype!r}){near_miss(str(self.dtype), _TYPES)}: must be {' or '.join(_TYPES)}"
            )
        scale = self.loss_scale
        is_number = isinstance(scale, int | float) and not isinstance(scale, bool) and 0 < scale < float("inf")
        if scale is not None and scale != DYNAMIC and not is_number:
            raise StrategyError(
                f'mixed_precision(loss_scale={scale!r}): must be a number above 0, "{DYNAMIC}", or None for no scale'
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        """The lower precision."""
        return _TYPES[self.dtype]

    @property
    def notes(self) -> list[str]:
        """What the plan must say."""
        if self.dtype == "float16" and self.loss_scale is None:
            return ['float16 without a loss scale: small gradients vanish; give mixed_precision(loss_scale="dynamic")']
        return []


def autocast(spec: PrecisionSpec | None) -> contextlib.AbstractContextManager[Any]:
    """Return torch's autocast of this rank's device, or nothing."""
    if spec is None:
        return contextlib.nullcontext()
    return torch.autocast(world.device().type, spec.torch_dtype)


def next_scale(scale: Any, good_steps: int, factor: float, window: int, least: float = 0.0) -> Any:
    """Return a loss scale after a step: multiplied after every `window` good steps, divided after one that overflowed.

    Args:
        good_steps: steps since the last one that overflowed; 0: this one did.
        least: what it is not divided below.
    """
    if good_steps == 0:
        return max(scale / factor, least)
    return scale if good_steps % window else scale * factor


class LossScale:
    """The loss scale of one AutoParallel.

    Args:
        is_shared: the ranks train one network, so that they must skip the same steps.
    """

    def __init__(self, spec: PrecisionSpec, *, is_shared: bool) -> None:
        self._is_dynamic = spec.loss_scale == DYNAMIC
        self.value = INITIAL_SCALE if self._is_dynamic else float(spec.loss_scale or 1.0)
        self.skipped_steps = 0
        self._good_steps = 0
        self._is_shared = is_shared

    def enter(self, arguments: Any) -> Any:
        """Return a call's arguments; what the caller sees as their gradients is not scaled."""
        factor = 1.0 / self.value
        return pytree.tree_map_only(Tensor, lambda x: scale_gradient(x, factor), arguments)

    def leave(self, result: Any) -> Any:
        """Return a call's results; their backward passes begin with the scale."""
        factor = self.value
        return pytree.tree_map_only(Tensor, lambda x: scale_gradient(x, factor), result)

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Divide the gradients that reach these parameters by the scale, and look at them before optimizers step."""
        _look_before_steps()
        for parameter in parameters:
            known: LossScale | None = _scale_of.get(parameter)
            if known is not None and known is not self:
                raise StrategyError(
                    f"a parameter of shape {tuple(parameter.shape)} is trained by two AutoParallel with a loss scale: "
                    "train it with one"
                )
            if known is None and parameter.requires_grad:
                _scale_of[parameter] = self
                with plain_tensors():
                    Tensor.register_hook(parameter, lambda gradient: gradient / self.value)

    def accepts(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether every gradient is finite on every rank, and adapt the scale. All ranks call it together."""
        with plain_tensors():
            local = [g.detach()._values() if g.is_sparse else g.detach() for g in gradients]
            norms = [torch.linalg.vector_norm(g, float("inf")).float() for g in local if g.numel()]
        is_bad = torch.zeros((), device=world.device())
        if norms:
            is_bad = (~torch.stack(norms).isfinite().all()).float()
        if self._is_shared and world.get_group_size() > 1:
            traffic.add("all_reduce", is_bad)
            with waiting_in(lambda: "the comparison of overflows"):
                dist.all_reduce(is_bad, dist.ReduceOp.MAX)
        is_good = not bool(is_bad)
        self._adapt(is_good)
        return is_good

    def _adapt(self, is_good: bool) -> None:
        self.skipped_steps += not is_good
        self._good_steps = self._good_steps + 1 if is_good else 0
        if self._is_dynamic:
            self.value = next_scale(self.value, self._good_steps, 2.0, GOOD_STEPS)


_scale_of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""parameter -> the loss scale of who trains it"""


@functools.cache
def _look_before_steps() -> None:
    """Do so from now on; once in a process."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Take an optimizer's gradients away when one of them is not finite: torch's optimizers then do nothing."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    scales = {id(scale): scale for p in parameters if (scale := _scale_of.get(p)) is not None}
    for scale in scales.values():
        mine = [p.grad for p in parameters if _scale_of.get(p) is scale and p.grad is not None]
        if not scale.accepts(mine):
            for parameter in parameters:
                parameter.grad = None
