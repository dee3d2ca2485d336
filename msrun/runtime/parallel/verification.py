"""verify: one training step on all ranks, and the same step as one process would run it, compared value by value.

The step runs twice. First as AutoParallel runs it; then every rank holds whole parameters and the whole global batch
for a moment and runs the network as it is, as in a world of one process. The loss, every gradient and every buffer are
compared, each rank its own parts; the largest differences of all ranks are the report. Afterwards parameters,
gradients, buffers, random generators, the stream of dropout and plain attributes of the modules are what they were.

Nothing of the reference goes through capture, partition or an operator rule, so it finds what they got wrong.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from msrun import contract
from msrun.errors import StrategyError, VerificationError
from msrun.runtime import world
from msrun.runtime.checkpoint.agreement import gather
from msrun.runtime.checkpoint.parts import Box, Part, find_box
from msrun.runtime.checkpoint.random_state import put_random_state, take_random_state
from msrun.runtime.nn.dropout_stream import stream_of
from msrun.runtime.nn.replaced import current
from msrun.runtime.parallel.auto_parallel import AutoParallel, runs_alone
from msrun.runtime.parallel.batch.divided_batch import find_parts, find_wrappers
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.compilation.announcement import log
from msrun.runtime.parallel.gradient import current_probe
from msrun.runtime.parallel.parameters.storage import after_placement, is_held
from msrun.runtime.parallel.parameters.whole import join_parts, whole_parameters
from msrun.runtime.parallel.scaling import replica_scales
from msrun.runtime.parallel.settings import REPLICA_MODES
from msrun.runtime.parallel.user_name import user_name

TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest difference allowed, by the lowest precision in which a value is computed, relative to the largest element of
the value in one process. Other types (integers, bool) must be equal."""
SMALL = 1e-2
"""A gradient whose largest element is below this share of the network's largest one is measured against that share: a
bias before a normalisation has a gradient of rounding errors alone."""
SHOWN = 12

is_verifying: ContextVar[bool] = ContextVar("is_verifying", default=False)
"""True while a step is run for verification."""


class _NotVerifiable(StrategyError):
    """This network, or this way of running it, has no step of one process to compare with."""


@dataclass(frozen=True)
class Difference:
    """How far one value is from that of one process."""

    name: str
    absolute: float
    """Largest difference of an element; inf where one of both is not finite, or has no gradient."""
    relative: float
    """The same, divided by the largest element in one process."""
    allowed: float
    """Largest relative difference."""
    rank: int
    """Where it was found."""
    remark: str = ""

    @property
    def is_within(self) -> bool:
        """True when it is allowed."""
        return self.relative <= self.allowed

    @property
    def excess(self) -> float:
        """How many times as large as allowed it is; where nothing is allowed, inf for any difference."""
        return self.relative / self.allowed if self.allowed else math.inf if self.relative else 0.0


@dataclass(frozen=True)
class VerificationReport:
    """What `AutoParallel.verify` found; as text it is a table, the worst differences first."""

    world_size: int
    differences: tuple[Difference, ...]
    """Of every value, the worst one first."""
    note: str = ""
    """Why nothing was compared."""

    @property
    def failures(self) -> tuple[Difference, ...]:
        """Those above their tolerance."""
        return tuple(d for d in self.differences if not d.is_within)

    @property
    def is_equal(self) -> bool:
        """True when no difference is above its tolerance."""
        return not self.failures

    def __str__(self) -> str:
        if self.note:
            return f"verify: {self.note}"
        count = len(self.differences)
        lines = [f"verify: {count - len(self.failures)} of {count} values of {self.world_size} ranks equal one process"]
        shown = self.differences[: max(SHOWN, min(len(self.failures), 4 * SHOWN))]
        width = max((len(d.name) for d in shown), default=0)
        lines.append(f"  {'value':<{width}}  {'largest difference':>18}  {'relative':>8}  {'allowed':>8}")
        for d in shown:
            verdict = "" if d.is_within else f"  DIFFERS on rank {d.rank}"
            remark = f" ({d.remark})" if d.remark else ""
            line = f"  {d.name:<{width}}  {d.absolute:>18.2e}  {d.relative:>8.1e}  {d.allowed:>8.0e}{verdict}{remark}"
            lines.append(line)
        if count > len(shown):
            lines.append(f"  {count - len(shown)} more, with smaller differences")
        return "\n".join(lines)

    def raise_if_different(self) -> None:
        """Raise when a difference is above its tolerance.

        Raises:
            VerificationError: it is; the report is its `report`.
        """
        if self.is_equal:
            return
        worst = self.failures[0]
        how = worst.remark or f"by {worst.relative:.1e} of its largest element (allowed {worst.allowed:.0e})"
        raise VerificationError(
            f"{len(self.failures)} of {len(self.differences)} values differ from one process, first {worst.name}: {how}; "
            'do not trust this training: run it with parallel_mode="data_parallel", which captures nothing, and look '
            "for the first layer in the table that differs",
            report=self,
        )


def verify(
    parallel: AutoParallel,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    raises: bool = True,
    tolerance: float | None = None,
) -> VerificationReport:
    """Do the work of `AutoParallel.verify`."""
    if world.get_group_size() == 1 or parallel.settings.parallel_mode == "stand_alone":
        alone = "one process" if world.get_group_size() == 1 else "stand_alone ranks exchange nothing"
        return VerificationReport(world.get_group_size(), (), f"{alone}: there is nothing to compare")
    if parallel.settings.parallel_mode == "hybrid_parallel":
        raise _NotVerifiable(
            'verify() with parallel_mode="hybrid_parallel": nobody knows the whole of a network that is cut by hand; '
            "compare it with the uncut one yourself"
        )
    probe = _Probe(parallel, tolerance)
    random = take_random_state()
    token = is_verifying.set(True)
    try:
        if isinstance(parallel.network, nn.Module):
            report = probe.compare_module(parallel.network, args, kwargs)
        else:
            report = probe.run_step(parallel, args, kwargs)
    finally:
        is_verifying.reset(token)
        put_random_state(random)
    if world.get_rank() == 0 and not report.is_equal:
        log.error("%s", report)
    if raises:
        report.raise_if_different()
    return report


_verified: weakref.WeakSet[AutoParallel] = weakref.WeakSet()


def verify_first_step(parallel: AutoParallel, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """With MSRUN_VERIFY=1, verify the first training step of an AutoParallel, once; rank 0 logs the report.

    Raises:
        VerificationError: the step differs from that of one process.
    """
    network = parallel.network
    if os.environ.get(contract.MSRUN_VERIFY, "0") in ("", "0") or parallel in _verified or is_verifying.get():
        return
    if isinstance(network, nn.Module) and not (network.training and torch.is_grad_enabled()):
        return
    _verified.add(parallel)
    try:
        report = verify(parallel, args, kwargs)
    except _NotVerifiable as error:
        if world.get_rank() == 0:
            log.warning("MSRUN_VERIFY: the first step was not verified: %s", error)
        return
    if world.get_rank() == 0:
        log.info("%s", report)


@dataclass(frozen=True)
class _Measured:
    """What one run of a step gave."""

    scalars: dict[str, Tensor]
    """The loss, and other results that are numbers."""
    inputs: list[Tensor | None]
    """Gradients of the batch's tensors that have one."""
    gradients: dict[str, Tensor | None]
    """By the name of the parameter."""
    buffers: dict[str, Tensor]


class _StepIsVerified(BaseException):  # noqa: N818 - no error: it ends the user's step function, whatever that catches
    """A step function has been run up to its first value_and_grad, which is all that is verified of it."""

    def __init__(self, report: VerificationReport) -> None:
        super().__init__()
        self.report = report


class _Probe:
    """Compares one step of an AutoParallel with that of one process."""

    def __init__(self, parallel: AutoParallel, tolerance: float | None) -> None:
        self._parallel = parallel
        self._tolerance = tolerance

    # -- the two forms of use -----------------------------------------------------------------------------------

    def compare_module(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> VerificationReport:
        """Compare one call of a module, with the backward pass of its loss."""
        args, kwargs = pytree.tree_map_only(Tensor, _fresh, (tuple(args), dict(kwargs)))

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured:
            with torch.enable_grad():
                result = self._parallel(*args, **kwargs)
            inputs = [tensor for tensor in find_tensors(args, kwargs) if tensor.requires_grad]
            loss = _find_loss(result)
            if runs_alone.get():  # what DDP has hung on `backward` must not see this one
                named = _trained(network)
                wanted = [*inputs, *named.values()]
                found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
            else:
                loss.backward()
                named = _trained(network)  # between both passes FSDP2 shows other objects
                found = tuple(tensor.grad for tensor in (*inputs, *named.values()))
            of_inputs, of_parameters = list(found[: len(inputs)]), list(found[len(inputs) :])
            gradients = dict(zip(named, of_parameters, strict=True))
            return _Measured(_scalars(result), of_inputs, gradients, _buffers(network))

        return self._compare(network, run, args, kwargs)

    def run_step(self, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> VerificationReport:
        """Run a step function up to its first `value_and_grad`, and compare that."""
        token = current_probe.set(self)
        try:
            step(*args, **kwargs)
        except _StepIsVerified as verified:
            return verified.report
        finally:
            current_probe.reset(token)
        raise _NotVerifiable("verify(): the step function called no function of value_and_grad; verify the network")

    def meet(
        self,
        function: Callable[..., Any],
        differentiate: Callable[..., tuple[Any, Any]],
        weights: Sequence[Tensor],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> None:
        """Compare what `value_and_grad` gives, and end the step function, which would go on to train.

        Args:
            differentiate: runs `function` and returns its result and gradients, those of `weights` last.
        """
        token = current_probe.set(None)
        root = self._parallel.root_of(function)

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured:
            result, gradients = differentiate(*args, **kwargs)
            found = [leaf for leaf in pytree.tree_leaves(gradients) if isinstance(leaf, Tensor)]
            count = len(found) - len(weights)
            names = {id(parameter): user_name(name) for name, parameter in _trained(root).items()}
            named = (names.get(id(current(weight)), f"weight {i}") for i, weight in enumerate(weights))
            return _Measured(
                _scalars(result),
                list(found[:count]),
                dict(zip(named, found[count:], strict=True)),
                _buffers(root),
            )

        try:
            raise _StepIsVerified(self._compare(root, run, args, kwargs))
        finally:
            current_probe.reset(token)

    # -- both runs ----------------------------------------------------------------------------------------------

    def _compare(
        self,
        root: nn.Module,
        run: Callable[[Sequence[Any], Mapping[str, Any]], _Measured],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> VerificationReport:
        self._check(root)
        with _as_before(root) as before:
            measured = run(args, kwargs)
            before.put_back()
            whole_args, whole_kwargs, boxes = self._whole_batch(root, args, kwargs)
            held = {user_name(name): find_box(p) for name, p in root.named_parameters() if is_held(p)}
            with whole_parameters(root):
                token = runs_alone.set(True)
                expected, failure = _attempt(lambda: run(whole_args, whole_kwargs))
                runs_alone.reset(token)
        if expected is None:
            raise _NotVerifiable(f"verify(): the network does not run in one process: {failure}")
        found = self._differences(measured, expected, boxes, held)
        return VerificationReport(world.get_group_size(), _worst_of(gather(found)))

    def _check(self, root: nn.Module) -> None:
        if self._parallel.settings.parallel_mode not in REPLICA_MODES:
            return
        for name, module in root.named_modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
            if is_norm and module.training:
                raise _NotVerifiable(
                    f'verify() with parallel_mode="data_parallel": {user_name(name)} normalises the rows of each rank '
                    'apart, which no single process does; use nn.SyncBatchNorm, or parallel_mode="semi_auto"'
                )

    # -- the batch ----------------------------------------------------------------------------------------------

    def _whole_batch(
        self, root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Any], Mapping[str, Any], list[_Passed]]:
        """Return the global batch, and what this rank has passed of each of its tensors that has a gradient.

        A copy or micro batch of all ranks together holds one run of each rank's rows. The rows of the global batch are
        put in that order, so that the wrappers of one process make the same parts.
        """
        tensors = find_tensors(args, kwargs)
        boxes = self._boxes(root, tensors)
        wholes = join_parts([Part(tensor.detach(), box) for tensor, box in zip(tensors, boxes, strict=True)])
        ranks = self._parallel.settings.batch_parts(world.get_group_size())
        parts = find_parts(find_wrappers(root)).total
        rows = next((box.shape[0] for box in boxes if box.shape), 0)
        passed, values = [], []
        for tensor, box, whole in zip(tensors, boxes, wholes, strict=True):
            has_rows = ranks > 1 and parts > 1 and box.shape[:1] == (rows,)
            value = _reordered(whole, ranks, parts) if has_rows else whole.clone()
            values.append(value.requires_grad_(tensor.requires_grad))
            if tensor.requires_grad:
                passed.append(_Passed(box, (parts, ranks) if has_rows else (1, 1)))
        given = iter(values)
        whole_args, whole_kwargs = pytree.tree_map_only(Tensor, lambda _: next(given), (tuple(args), dict(kwargs)))
        return whole_args, whole_kwargs, passed

    def _boxes(self, root: nn.Module, tensors: Sequence[Tensor]) -> list[Box]:
        """Return which part of each of the global batch's tensors this rank has passed."""
        if self._parallel.settings.parallel_mode in REPLICA_MODES:
            everyone = gather([tuple(tensor.shape) for tensor in tensors])
            return [_rows_of(shapes, world.get_rank()) for shapes in zip(*everyone, strict=True)]
        compilation = self._parallel.compilation_of(root)
        places = [compilation.place_in_batch(index, tensor) for index, tensor in enumerate(tensors)]
        return [Box(shape, tuple(s.start for s in at), tuple(s.stop - s.start for s in at)) for shape, at in places]

    # -- comparing ----------------------------------------------------------------------------------------------

    def _differences(
        self, measured: _Measured, expected: _Measured, passed: Sequence[_Passed], held: Mapping[str, Box]
    ) -> list[Difference]:
        """Return how far this rank's values are from those of one process."""
        settings = self._parallel.settings
        of_parameters, of_inputs = 1.0, 1.0
        if settings.parallel_mode in REPLICA_MODES:  # sums, where the user wants them, are those of all ranks
            factors = replica_scales(settings.compat, settings.averages_gradients, world.get_group_size())
            of_parameters, of_inputs = factors.start, factors.own * factors.start * world.get_group_size()
        found = [self._difference(n, value, expected.scalars[n], floor=SMALL) for n, value in measured.scalars.items()]
        for i, (part, gradient) in enumerate(zip(passed, measured.inputs, strict=True)):
            whole = expected.inputs[i]
            whole = None if whole is None else _reordered(whole, *part.order)[part.box.slices] * of_inputs
            found.append(self._difference(f"gradient of input {i}", gradient, whole))
        largest = max((_largest(g) for g in expected.gradients.values() if g is not None), default=0.0)
        for name, gradient in measured.gradients.items():
            whole = expected.gradients[name]
            if name in held:
                part_of = None if whole is None else whole[held[name].slices] * of_parameters
                scale = 0.0 if whole is None else _largest(whole)
                floor = max(scale, SMALL * largest) * of_parameters
                found.append(self._difference(f"gradient of {name}", gradient, part_of, floor=floor))
        largest = max((_largest(b) for b in expected.buffers.values() if b.is_floating_point()), default=0.0)
        for name, buffer in measured.buffers.items():
            found.append(self._difference(f"buffer {name}", buffer, expected.buffers[name], floor=SMALL * largest))
        return found

    def _difference(self, name: str, found: Tensor | None, right: Tensor | None, *, floor: float = 0.0) -> Difference:
        """Compare one value.

        Args:
            floor: what the difference is at least measured against.
        """
        rank = world.get_rank()
        if found is None or right is None:
            if found is right:
                return Difference(name, 0.0, 0.0, 0.0, rank)
            remark = "None, but not in one process" if found is None else "None in one process, but not here"
            return Difference(name, math.inf, math.inf, 0.0, rank, remark)
        local = found.to_local() if isinstance(found, DTensor) else found
        if local.shape != right.shape:
            remark = f"of shape {tuple(local.shape)}, in one process {tuple(right.shape)}"
            return Difference(name, math.inf, math.inf, 0.0, rank, remark)
        absolute = _distance(local, right)
        scale = max(_largest(right), floor)
        relative = 0.0 if absolute == 0 else absolute / scale if scale else math.inf
        return Difference(name, absolute, relative, self._allowed(right.dtype), rank)

    def _allowed(self, dtype: torch.dtype) -> float:
        if dtype not in TOLERANCES:
            return 0.0
        if self._tolerance is not None:
            return self._tolerance
        precision = self._parallel.settings.precision
        return max(TOLERANCES[dtype], TOLERANCES[precision.torch_dtype] if precision else 0.0)


@dataclass(frozen=True)
class _Passed:
    """What this rank has passed of a tensor of the batch."""

    box: Box
    order: tuple[int, int]
    """(parts, ranks) by which rows in the order of parts come back into that of ranks."""


def _fresh(tensor: Tensor) -> Tensor:
    """Return the same values as a leaf of autograd, so that no gradient goes beyond this step."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _rows_of(shapes: Sequence[tuple[int, ...]], rank: int) -> Box:
    """Return the box of a rank's rows when the ranks' tensors are joined along dimension 0."""
    own = shapes[rank]
    if not own:
        return Box((), (), ())
    rows = [shape[0] for shape in shapes]
    return Box((sum(rows), *own[1:]), (sum(rows[:rank]), *(0,) * (len(own) - 1)), own)


def _reordered(whole: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows that are `outer` times `inner` runs as `inner` times `outer` runs."""
    rows = whole.shape[0] // (outer * inner) if whole.dim() else 1
    if outer == 1 or inner == 1:
        return whole
    return whole.reshape(outer, inner, rows, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)


def _trained(root: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that get gradients, under the user's names."""
    return {user_name(name): p for name, p in root.named_parameters() if p.requires_grad}


def _buffers(root: nn.Module) -> dict[str, Tensor]:
    return {user_name(name): buffer.detach().clone() for name, buffer in root.named_buffers()}


def _scalars(result: Any) -> dict[str, Tensor]:
    """Return the numbers among the results of a network; the first one is the loss."""
    leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    numbers = [x.detach().clone() for x in leaves if x.dim() == 0 and x.is_floating_point()]
    return {"loss" if i == 0 else f"result {i}": value for i, value in enumerate(numbers)}


def _find_loss(result: Any) -> Tensor:
    """Return the first result that is a number with a gradient.

    Raises:
        StrategyError: there is none.
    """
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad:
            return leaf
    raise _NotVerifiable(
        "verify() needs a network that returns its loss, a scalar with a gradient: give AutoParallel the network with "
        "its loss, such as WithLoss(net, loss_fn)"
    )


def _largest(tensor: Tensor) -> float:
    """Return the largest finite absolute value; 0 of an empty tensor."""
    values = tensor.detach().abs()
    values = values[values.isfinite()] if values.is_floating_point() else values
    return float(values.max()) if values.numel() else 0.0


def _distance(found: Tensor, right: Tensor) -> float:
    """Return the largest difference of two elements; inf where only one is finite, or both are infinite or not
    numbers but not alike."""
    if not found.numel() or torch.equal(found, right):
        return 0.0
    first, second = found.detach().double(), right.detach().double()
    alike = (first == second) | (first.isnan() & second.isnan())
    return float(torch.where(alike, 0.0, (first - second).abs()).nan_to_num(math.inf, math.inf).max())


def _worst_of(found: Sequence[Sequence[Difference]]) -> tuple[Difference, ...]:
    """Return for every value the worst difference of all ranks, the worst values first."""
    worst: dict[str, Difference] = {}
    for difference in (d for of_rank in found for d in of_rank):
        known = worst.get(difference.name)
        if known is None or difference.excess > known.excess:
            worst[difference.name] = difference
    return tuple(sorted(worst.values(), key=lambda d: -d.excess))


def _attempt(work: Callable[[], _Measured]) -> tuple[_Measured | None, str]:
    """Run the step of one process on every rank; all ranks learn whether it went well everywhere."""
    done, failure = None, ""
    try:
        done = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(gather(failure)) if text]
    return (None, failed[0]) if failed else (done, "")


# -- what is put back -------------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, type(None))


class _Before:
    """What a step changes in a network, as it was before."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.take()

    def take(self) -> None:
        """Remember buffers, plain attributes and the stream of dropout as they are now."""
        modules = list(self._root.modules())
        self._buffers = [
            (module, name, buffer, None if buffer.is_meta else buffer.detach().clone())
            for module in modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._plain = [(m, {k: v for k, v in vars(m).items() if isinstance(v, _PLAIN)}) for m in modules]
        self._stream = stream_of(self._root)
        self._draws = self._stream.seed, self._stream.step

    def put_back(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for module, name, buffer, value in self._buffers:
                module._buffers[name] = buffer
                if value is not None and not torch.equal(buffer, value):
                    buffer.copy_(value)
        for module, plain in self._plain:
            vars(module).update(plain)
        self._stream.seed, self._stream.step = self._draws


@contextmanager
def _as_before(root: nn.Module) -> Iterator[_Before]:
    """Let training steps run without a trace: at the end the network is as it was, or as its first call has placed it.

    Hooks that run after gradients were accumulated, such as an optimizer's, do not run inside.
    """
    before = _Before(root)
    kept = [(parameter, parameter.grad) for parameter in root.parameters()]
    hooks = [(h, dict(h)) for p, _ in kept if (h := getattr(p, "_post_accumulate_grad_hooks", None))]
    for parameter, _ in kept:
        parameter.grad = None
    for of_parameter, _ in hooks:
        of_parameter.clear()
    token = after_placement.set(before.take)
    try:
        yield before
    finally:
        after_placement.reset(token)
        before.put_back()
        for of_parameter, all_of_them in hooks:
            of_parameter.update(all_of_them)
        for parameter in root.parameters():
            parameter.grad = None
        for parameter, gradient in kept:
            if gradient is None or gradient.shape == parameter.shape:  # a first call cuts them
                parameter.grad = gradient
