"""verify: one training step on all ranks, and the same step as one process would run it, compared value by value.

The step runs twice. First as AutoParallel runs it; then every rank holds whole parameters and the whole global batch
for a moment and runs the network as it is, as in a world of one process. The loss, every gradient and every buffer are
compared, each rank its own parts; the largest differences of all ranks are the report. Afterwards parameters,
gradients, buffers, random generators, the stream of dropout and plain attributes of the modules are what they were.

Nothing of the reference goes through capture, partition or an operator rule, so it finds what they got wrong.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun import contract
from msrun.errors import UnverifiableError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.execute.phase import current_probe, is_verifying, running_alone, runs_alone
from msrun.runtime.execute.placement import is_held
from msrun.runtime.nn.random_state import put_random_state, take_random_state
from msrun.runtime.nn.replaced import current
from msrun.runtime.parallel.batch.divided_batch import find_parts, find_wrappers
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.parameters.network_state import Chunk, find_box
from msrun.runtime.parallel.parameters.whole import join_chunks, whole_parameters
from msrun.runtime.parallel.plan import log
from msrun.runtime.parallel.scaling import replica_scales
from msrun.runtime.parallel.settings import REPLICA_MODES
from msrun.runtime.parallel.user_name import user_name
from msrun.runtime.parallel.verification.distance import SMALL, Tolerance, find_difference, largest
from msrun.runtime.parallel.verification.report import Difference, VerificationReport, worst_of
from msrun.runtime.parallel.verification.untouched import untouched
from msrun.runtime.server.remote import find_remotes
from msrun.runtime.sharding.box import Box
from msrun.runtime.tensors.plain_tensors import plain

if TYPE_CHECKING:
    from msrun.runtime.parallel.auto_parallel import AutoParallel  # which calls this module


def verify_step(
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
        raise UnverifiableError(
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

    Calls after it, and while another step is verified, pass by.

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
        report = verify_step(parallel, args, kwargs)
    except UnverifiableError as error:
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
    inputs: Sequence[Tensor | None]
    """Gradients of the batch's tensors that have one."""
    gradients: dict[str, Tensor | None]
    """By the name of the parameter."""
    buffers: dict[str, Tensor]


class _StepIsVerified(BaseException):
    """A step function has been run up to its first value_and_grad. No Exception: what it catches must not stop it."""

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
            found: Sequence[Tensor | None]
            if runs_alone.get():  # what DDP has hung on `backward` must not see this one
                named = _trained(network)
                wanted = [*inputs, *named.values()]
                found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
            else:
                loss.backward()
                named = _trained(network)  # between both passes FSDP2 shows other objects
                found = tuple(tensor.grad for tensor in (*inputs, *named.values()))
            of_inputs, of_parameters = list(found[: len(inputs)]), list(found[len(inputs) :])
            gradients = dict(zip(named, map(_dense, of_parameters), strict=True))
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
        raise UnverifiableError("verify(): the step function called no function of value_and_grad; verify the network")

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
        root = _root_of(self._parallel, function)

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured:
            result, gradients = differentiate(*args, **kwargs)
            found = [leaf for leaf in pytree.tree_leaves(gradients) if isinstance(leaf, Tensor)]
            count = len(found) - len(weights)
            names = {id(parameter): user_name(name) for name, parameter in _trained(root).items()}
            known = [names.get(id(current(weight)), f"weight {i}") for i, weight in enumerate(weights)]
            of_weights: dict[str, Tensor | None] = dict(zip(known, map(_dense, found[count:]), strict=True))
            return _Measured(_scalars(result), found[:count], of_weights, _buffers(root))

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
        with untouched(root) as before:
            measured = run(args, kwargs)
            before.put_back()
            whole_args, whole_kwargs, boxes = self._whole_batch(root, args, kwargs)
            held = {user_name(name): find_box(p) for name, p in root.named_parameters() if is_held(p)}
            with whole_parameters(root), running_alone():
                expected, failure = _attempt(lambda: run(whole_args, whole_kwargs))
        if expected is None:
            raise UnverifiableError(f"verify(): the network does not run in one process: {failure}")
        found = self._differences(measured, expected, boxes, held)
        is_captured = self._parallel.settings.parallel_mode not in REPLICA_MODES
        return VerificationReport(world.get_group_size(), worst_of(gather(found)), is_captured=is_captured)

    def _check(self, root: nn.Module) -> None:
        if self._parallel.settings.parallel_mode not in REPLICA_MODES:
            return
        if list(find_remotes(root.parameters())):
            raise UnverifiableError(
                "verify() of parameters on servers: one step would train them; verify the network without set_param_ps"
            )
        for name, module in root.named_modules():
            is_norm = isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, nn.SyncBatchNorm)
            if is_norm and module.training:
                raise UnverifiableError(
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
        wholes = join_chunks([Chunk(tensor.detach(), box) for tensor, box in zip(tensors, boxes, strict=True)])
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
        compilation = self._parallel._compilations[id(root)]
        places = [compilation.place_in_batch(index, tensor) for index, tensor in enumerate(tensors)]
        return [Box(shape, tuple(s.start for s in at), tuple(s.stop - s.start for s in at)) for shape, at in places]

    # -- comparing ----------------------------------------------------------------------------------------------

    def _differences(
        self, measured: _Measured, expected: _Measured, passed: Sequence[_Passed], held: Mapping[str, Box]
    ) -> list[Difference]:
        """Return how far this rank's values are from those of one process."""
        settings = self._parallel.settings
        precision = settings.precision.torch_dtype if settings.precision else None
        compare = partial(find_difference, tolerance=Tolerance(self._tolerance, precision))
        of_parameters, of_inputs = 1.0, 1.0
        if settings.parallel_mode in REPLICA_MODES:  # sums, where the user wants them, are those of all ranks
            factors = replica_scales(settings.compat, settings.averages_gradients, world.get_group_size())
            of_parameters, of_inputs = factors.start, factors.own * factors.start * world.get_group_size()
        found = [compare(n, value, expected.scalars.get(n), floor=SMALL) for n, value in measured.scalars.items()]
        for i, (part, gradient) in enumerate(zip(passed, measured.inputs, strict=True)):
            whole = expected.inputs[i]
            whole = None if whole is None else _reordered(whole, *part.order)[part.box.slices] * of_inputs
            found.append(compare(f"gradient of input {i}", gradient, whole))
        most = max((largest(g) for g in expected.gradients.values() if g is not None), default=0.0)
        for name, gradient in measured.gradients.items():
            whole = expected.gradients[name]
            if name in held:
                part_of = None if whole is None else whole[held[name].slices] * of_parameters
                scale = 0.0 if whole is None else largest(whole)
                floor = max(scale, SMALL * most) * of_parameters
                found.append(compare(f"gradient of {name}", gradient, part_of, floor=floor))
        most = max((largest(b) for b in expected.buffers.values() if b.is_floating_point()), default=0.0)
        for name, buffer in measured.buffers.items():
            found.append(compare(f"buffer {name}", buffer, expected.buffers[name], floor=SMALL * most))
        return found


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


def _root_of(parallel: AutoParallel, function: Callable[..., Any]) -> nn.Module:
    """Return the module that holds every parameter of a function, the same as `AutoParallel.run` finds."""
    return parallel._target(function).root


def _dense(gradient: Tensor | None) -> Tensor | None:
    """Return a gradient of rows with zeros in the others, of this rank's part."""
    return plain(gradient).to_dense() if gradient is not None and gradient.is_sparse else gradient


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
        UnverifiableError: there is none.
    """
    tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor) and leaf.requires_grad]
    for tensor in tensors:
        if tensor.dim() == 0:
            return tensor
    torch.autograd.backward([tensor.sum() for tensor in tensors])  # DDP and FSDP2 wait for one after every forward pass
    raise UnverifiableError(
        "verify() needs a network that returns its loss, a scalar with a gradient: give AutoParallel the network with "
        "its loss, such as WithLoss(net, loss_fn)"
    )


def _attempt(work: Callable[[], _Measured]) -> tuple[_Measured | None, str]:
    """Run the step of one process on every rank; all ranks learn whether it went well everywhere."""
    done, failure = None, ""
    try:
        done = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(gather(failure)) if text]
    return (None, failed[0]) if failed else (done, "")
