"""verify: one training step on all ranks, and the same step as one process would run it, compared value by value.

The step runs twice. First as AutoParallel runs it; then every rank holds whole parameters and the whole global batch
for a moment and runs the network as it is, as in a world of one process. The loss, every gradient and every buffer are
compared, each rank its own parts; the largest differences of all ranks are the report. Afterwards parameters,
gradients, buffers, random generators, the stream of dropout and plain attributes of the modules are what they were.

Nothing of the reference goes through capture, partition or an operator rule, so it finds what they got wrong.
"""

from __future__ import annotations

import functools
import math
import operator
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from msrun import contract
from msrun.errors import UnverifiableError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.execute.phase import Differentiation, current_probe, is_verifying, running_alone, runs_alone
from msrun.runtime.execute.placement import is_held
from msrun.runtime.nn.random_stream import drawing, put_random_state, take_random_state
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.batch.divided_batch import find_parts, find_wrappers
from msrun.runtime.parallel.batch.parts import find_tensors
from msrun.runtime.parallel.parameters.network_state import find_box
from msrun.runtime.parallel.parameters.whole import gathered_parameters
from msrun.runtime.parallel.plan import log
from msrun.runtime.parallel.precision import replica_scales
from msrun.runtime.parallel.verification.first_operator import MOST_BYTES, KeptValues, find_first_operator
from msrun.runtime.parallel.verification.report import (
    NOISE,
    SMALL,
    TOLERANCES,
    Difference,
    Tolerance,
    VerificationReport,
    find_difference,
    gradient_noise,
    largest,
    rounded_otherwise,
    worst_of,
)
from msrun.runtime.parallel.verification.untouched import untouched
from msrun.runtime.parts.on_servers import find_remotes
from msrun.runtime.parts.part import Part
from msrun.runtime.sharding.layout import Box
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
    if world.get_group_size() == 1 or parallel.settings.is_lone:
        alone = "one process" if world.get_group_size() == 1 else "stand_alone ranks exchange nothing"
        return VerificationReport(world.get_group_size(), (), f"{alone}: there is nothing to compare")
    probe = Comparison(parallel, tolerance)
    with verifying():
        if isinstance(parallel.network, nn.Module):
            report = probe.compare_module(parallel.network, args, kwargs)
        else:
            report = probe.run_step(parallel, args, kwargs)
    if world.get_rank() == 0 and not report.is_equal:
        log.error("%s", report)
    if raises:
        report.raise_if_different()
    return report


@contextmanager
def verifying() -> Iterator[None]:
    """Let steps count as none, and put the random generators back at the end."""
    random = take_random_state()
    token = is_verifying.set(True)
    try:
        yield
    finally:
        is_verifying.reset(token)
        put_random_state(random)


@dataclass(frozen=True)
class _Measured:
    """What one run of a step gave."""

    scalars: dict[str, Tensor]
    """The loss, and other results that are numbers."""
    counts: dict[str, Tensor]
    """Results that are whole numbers."""
    rows: dict[str, Tensor]
    """Results that are no single numbers."""
    inputs: Mapping[int, Tensor | None]
    """Gradients of the batch's tensors that want one, by their number."""
    gradients: dict[str, Tensor | None]
    """By the name of the parameter."""
    buffers: dict[str, Tensor]


class _StepIsVerified(BaseException):
    """A step function has been run up to its first value_and_grad. No Exception: what it catches must not stop it."""

    def __init__(self, report: VerificationReport) -> None:
        super().__init__()
        self.report = report


class Comparison:
    """Compares one step of an AutoParallel with that of one process."""

    def __init__(self, parallel: AutoParallel, tolerance: float | None) -> None:
        self._parallel = parallel
        self._tolerance = tolerance
        precision = parallel.settings.precision
        self._precision = precision.torch_dtype if precision else None
        """The lowest in which the network computes, as far as it is known."""

    # -- the two forms of use -----------------------------------------------------------------------------------

    def compare_module(self, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> VerificationReport:
        """Compare one call of a module, with the backward pass of its loss.

        A network that returns none gets a loss of its results' mean, as one outside it would be.
        """
        args, kwargs = pytree.tree_map_only(Tensor, _fresh, (tuple(args), dict(kwargs)))

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured:
            with torch.enable_grad():
                result = self._parallel(*args, **kwargs)
            inputs = {i: tensor for i, tensor in enumerate(find_tensors(args, kwargs)) if tensor.requires_grad}
            loss = _loss_of(result)
            found: Sequence[Tensor | None]
            if runs_alone.get():  # what DDP has hung on `backward` must not see this one
                named = _trained(network)
                wanted = [*inputs.values(), *named.values()]
                found = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
            else:
                loss.backward()
                named = _trained(network)  # between both passes FSDP2 shows other objects
                found = tuple(tensor.grad for tensor in (*inputs.values(), *named.values()))
            of_inputs = dict(zip(inputs, found, strict=False))
            of_parameters = list(found[len(inputs) :])
            gradients = dict(zip(named, map(_dense, of_parameters), strict=True))
            return _Measured(_scalars(result), _counts(result), _rows(result), of_inputs, gradients, _buffers(network))

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

    def meet(self, call: Differentiation) -> None:
        """Compare what `value_and_grad` gives, and end the step function, which would go on to train."""
        token = current_probe.set(None)
        try:
            raise _StepIsVerified(self.compare_function(call))
        finally:
            current_probe.reset(token)

    def compare_function(self, call: Differentiation) -> VerificationReport:
        """Compare what `value_and_grad` gives."""
        weights = call.weights
        root = root_of(self._parallel, call.function)

        def run(args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Measured:
            result, gradients = call.run(*args, **kwargs)
            found = [leaf for leaf in pytree.tree_leaves(gradients) if isinstance(leaf, Tensor)]
            count = len(found) - len(weights)
            numbers = [len(find_tensors(args[:position], {})) for position in call.positions]
            names = {id(parameter): user_name(name) for name, parameter in _trained(root).items()}
            known = [names.get(id(weight), f"weight {i}") for i, weight in enumerate(weights)]
            of_weights: dict[str, Tensor | None] = dict(zip(known, map(_dense, found[count:]), strict=True))
            return _Measured(
                _scalars(result),
                _counts(result),
                _rows(result),
                dict(zip(numbers, found, strict=False)),
                of_weights,
                _buffers(root),
            )

        return self._compare(root, run, call.args, call.kwargs, code=call.function)

    # -- both runs ----------------------------------------------------------------------------------------------

    def _compare(
        self,
        root: nn.Module,
        run: Callable[[Sequence[Any], Mapping[str, Any]], _Measured],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        code: Callable[..., Any] | None = None,
    ) -> VerificationReport:
        self._check(root)
        engine, is_captured = self._parallel.engine, self._parallel.settings.is_captured
        with engine.syncing(), untouched(root, code) as before:
            measured = run(args, kwargs)
            before.put_back()
            whole_args, whole_kwargs, boxes = self._whole_batch(root, args, kwargs)
            held = {user_name(name): find_box(p) for name, p in root.named_parameters() if is_held(p)}
            with gathered_parameters(root), running_alone():
                expected, failure = _attempt(lambda: run(whole_args, whole_kwargs))
                if expected is None:
                    raise UnverifiableError(f"verify(): the network does not run in one process: {failure}")
                report = self._report(measured, expected, boxes, held)
                if report.is_equal:
                    return report
                compiled = engine.program
                before.put_back()
                with KeptValues(0 if compiled is None else MOST_BYTES) as kept:
                    run(whole_args, whole_kwargs)
                before.put_back()
                self._precision = max(kept.precisions, key=TOLERANCES.__getitem__, default=self._precision)
                with rounded_otherwise(root.parameters(), self._precision):
                    other, _ = _attempt(lambda: run(whole_args, whole_kwargs))
                before.put_back()
                noise = {} if other is None else gradient_noise(expected.gradients, other.gradients)
                report = self._report(measured, expected, boxes, held, noise)
                if report.is_equal:
                    return report
                if not is_captured:
                    reason = _reason(measured, expected, boxes, report.differences)
                    return replace(report, is_captured=False, reason=reason)
                if compiled is None:
                    return report
                parts = self._parallel.settings.batch_parts(world.get_group_size())
                with drawing(root, lambda question: gather(question())[0], parts):
                    first = find_first_operator(compiled, root, find_tensors(args, kwargs), kept)
                return replace(report, first_operator=first)

    def _report(
        self,
        measured: _Measured,
        expected: _Measured,
        passed: Sequence[_Passed],
        held: Mapping[str, Box],
        noise: Mapping[str, float] = MappingProxyType({}),
    ) -> VerificationReport:
        """Compare all ranks' values with those of one process. All ranks call it together.

        Args:
            noise: how far rounding alone carries the gradients of a parameter in one process, where it is known.
        """
        found = self._differences(measured, expected, passed, held, noise)
        worst = worst_of(gather([*found, *self._row_differences(measured, expected, passed)]))
        return VerificationReport(world.get_group_size(), worst)

    def _check(self, root: nn.Module) -> None:
        if self._parallel.settings.is_captured:
            return
        if self._parallel.settings.is_cut_by_hand:
            raise UnverifiableError(
                'verify() with parallel_mode="hybrid_parallel": nobody knows the whole of a network that is cut by '
                "hand; compare it with the uncut one yourself"
            )
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
        """Return the global batch, and what this rank has passed of each of its tensors.

        A copy or micro batch of all ranks together holds one run of each rank's rows. The rows of the global batch are
        put in that order, so that the wrappers of one process make the same parts.
        """
        tensors = find_tensors(args, kwargs)
        boxes = self._parallel.engine.boxes(root, tensors)
        pairs = list(zip(tensors, boxes, strict=True))
        everyone: list[Any] = gather([(box, None if box.is_whole else tensor.detach().cpu()) for tensor, box in pairs])
        of_tensors = zip(*everyone, strict=True)
        wholes = [_joined(tensor, box, parts) for (tensor, box), parts in zip(pairs, of_tensors, strict=True)]
        ranks = self._parallel.settings.batch_parts(world.get_group_size())
        parts = find_parts(find_wrappers(root)).total
        rows = next((box.shape[0] for box in boxes if box.shape), 0)
        passed, values = [], []
        for tensor, box, joined in zip(tensors, boxes, wholes, strict=True):
            has_rows = ranks > 1 and parts > 1 and box.shape[:1] == (rows,)
            value = _reordered(joined, ranks, parts) if has_rows else joined.clone()
            values.append(value.requires_grad_(tensor.requires_grad))
            passed.append(_Passed(box, (parts, ranks) if has_rows else (1, 1)))
        given = iter(values)
        whole_args, whole_kwargs = pytree.tree_map_only(Tensor, lambda _: next(given), (tuple(args), dict(kwargs)))
        return whole_args, whole_kwargs, passed

    # -- comparing ----------------------------------------------------------------------------------------------

    def _differences(
        self,
        measured: _Measured,
        expected: _Measured,
        passed: Sequence[_Passed],
        held: Mapping[str, Box],
        noise: Mapping[str, float],
    ) -> list[Difference]:
        """Return how far this rank's values are from those of one process."""
        settings = self._parallel.settings
        tolerance = Tolerance(self._tolerance, self._precision)
        compare = partial(find_difference, tolerance=tolerance)
        of_parameters, of_inputs = 1.0, 1.0
        if settings.is_replicated:  # sums, where the user wants them, are those of all ranks
            factors = replica_scales(settings.compat, settings.averages_gradients, world.get_group_size())
            of_parameters, of_inputs = factors.start, factors.own * factors.start * world.get_group_size()
        found = [compare(n, value, expected.scalars.get(n), floor=SMALL) for n, value in measured.scalars.items()]
        if settings.is_replicated:
            found += [compare(n, value, expected.counts.get(n)) for n, value in measured.counts.items()]
        for i, gradient in measured.inputs.items():
            whole, part = expected.inputs[i], passed[i]
            whole = None if whole is None else _reordered(whole, *part.order)[part.box.slices] * of_inputs
            found.append(compare(f"gradient of input {i}", gradient, whole))
        most = max((largest(g) for g in expected.gradients.values() if g is not None), default=0.0)
        for name, gradient in measured.gradients.items():
            whole = expected.gradients[name]
            if name in held:
                part_of = None if whole is None else whole[held[name].slices] * of_parameters
                scale = 0.0 if whole is None else largest(whole)
                floor = max(scale, tolerance.small * most) * of_parameters
                if whole is not None and (allowed := tolerance.allowed(whole.dtype)):
                    floor = max(floor, NOISE * noise.get(name, 0.0) * of_parameters / allowed)
                found.append(compare(f"gradient of {name}", gradient, part_of, floor=floor))
        most = max((largest(b) for b in expected.buffers.values() if b.is_floating_point()), default=0.0)
        for name, buffer in measured.buffers.items():
            found.append(compare(f"buffer {name}", buffer, expected.buffers[name], floor=SMALL * most))
        return found

    def _row_differences(
        self, measured: _Measured, expected: _Measured, passed: Sequence[_Passed]
    ) -> Iterator[Difference]:
        """Yield how far results are that are whole on every rank, or have a row for each row of this rank."""
        tolerance = Tolerance(self._tolerance, self._precision)
        if any(part.order != (1, 1) for part in passed):
            return  # the parts' rows have come in another order
        cut = next((p.box for p in passed if p.box.shape and p.box.shape[0] != p.box.sizes[0]), None)
        for name, value in measured.rows.items():
            right = expected.rows.get(name)
            if right is None:
                continue
            if cut is not None and value.shape[0] * cut.shape[0] == right.shape[0] * cut.sizes[0]:
                right = right.narrow(0, cut.offsets[0] * right.shape[0] // cut.shape[0], value.shape[0])
            if value.shape == right.shape:
                yield find_difference(name, value, right, tolerance, floor=SMALL)


def _reason(
    measured: _Measured, expected: _Measured, passed: Sequence[_Passed], differences: Sequence[Difference]
) -> str:
    """Return why ranks that each take the loss of their own rows most likely differ from one process."""
    ranks = world.get_group_size()
    found, right = (float(m.scalars.get("loss", torch.zeros(()))) for m in (measured, expected))
    boxes = [part.box for part in passed if part.box.shape and part.box.shape[0] != part.box.sizes[0]]
    is_uneven = any(gather(any(box.sizes[0] * ranks != box.shape[0] for box in boxes)))
    failed = [difference.name for difference in differences if not difference.is_within]
    if not math.isfinite(found) and math.isfinite(right):
        return "the loss of some rank is not finite, perhaps because none of its rows or labels is valid"
    if is_uneven:
        return "the ranks have different numbers of rows, and the mean of their means is not the mean over all rows"
    if found and math.isclose(right / found, ranks, rel_tol=1e-2):
        return 'the loss is a sum over rows (reduction="sum"), of which the ranks\' mean is taken'
    if all(name.startswith("buffer ") for name in failed):
        return "each rank writes buffers from its own rows"
    if all(name.startswith(("number ", "count ")) for name in failed):
        return "these numbers are each rank's own"
    return (
        "rows or labels that are masked, padded or ignored count unevenly, or rows are compared with each other, and "
        "each rank sees its own alone"
    )


@dataclass(frozen=True)
class _Passed:
    """What this rank has passed of a tensor of the batch."""

    box: Box
    order: tuple[int, int]
    """(parts, ranks) by which rows in the order of parts come back into that of ranks."""


def _fresh(tensor: Tensor) -> Tensor:
    """Return the same values as a leaf of autograd, so that no gradient goes beyond this step."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _joined(tensor: Tensor, box: Box, parts: Sequence[Any]) -> Tensor:
    """Return the whole of a tensor, of which this rank has passed the box, from what all ranks have."""
    if box.is_whole:
        return tensor.detach()
    joined = tensor.new_empty(box.shape)
    for place, value in parts:
        if value is not None:
            joined[place.slices] = value.to(joined.device)
    return joined


def _reordered(whole: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows that are `outer` times `inner` runs as `inner` times `outer` runs."""
    rows = whole.shape[0] // (outer * inner) if whole.dim() else 1
    if outer == 1 or inner == 1:
        return whole
    return whole.reshape(outer, inner, rows, *whole.shape[1:]).transpose(0, 1).reshape(whole.shape)


def root_of(parallel: AutoParallel, function: Callable[..., Any]) -> nn.Module:
    """Return the module that holds every parameter of a function, the same as `AutoParallel.run` finds."""
    return parallel.engine.target_of(function).root


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
    numbers = [x.detach().clone() for x in find_tensors((result,), {}) if x.dim() == 0 and x.is_floating_point()]
    return {"loss" if i == 0 else f"number {i}": value for i, value in enumerate(numbers)}


def _counts(result: Any) -> dict[str, Tensor]:
    found = enumerate(find_tensors((result,), {}))
    return {f"count {i}": x.detach().clone() for i, x in found if not x.dim() and not x.is_floating_point()}


def _rows(result: Any) -> dict[str, Tensor]:
    """Return the results of a network that are tensors of numbers with a point, by their place.

    One that is a cut parameter itself counts as the whole, as which its user sees it. All ranks call it together.
    """
    found = enumerate(find_tensors((result,), {}))
    wholes = {i: x.full_tensor() if isinstance(x, Part) else x for i, x in found if x.dim() and x.is_floating_point()}
    return {f"result {i}": x.detach().clone() for i, x in wholes.items()}


def _loss_of(result: Any) -> Tensor:
    """Return the first result that is a number with a gradient; without one, a loss of the results as a user would
    take it outside: a mean over all elements, which no normalisation holds fixed.
    """
    tensors = [x for x in find_tensors((result,), {}) if x.requires_grad]
    if not tensors:
        raise UnverifiableError("verify() of a network none of whose results has a gradient: nothing is trained")
    numbers = [x for x in tensors if x.dim() == 0]
    if numbers:
        return numbers[0]
    return functools.reduce(operator.add, map(_mean_of, tensors))


def _mean_of(result: Tensor) -> Tensor:
    value = result.abs() if result.is_complex() else result
    value = value.float() if value.element_size() < 4 else value
    return (1 + (value - 1).square()).sqrt().mean()


def _attempt(work: Callable[[], _Measured]) -> tuple[_Measured | None, str]:
    """Run the step of one process on every rank; all ranks learn whether it went well everywhere."""
    done, failure = None, ""
    try:
        done = work()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other ranks must not wait for this one
        failure = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(gather(failure)) if text]
    return (None, failed[0]) if failed else (done, "")


ELEMENTS, ELEMENTS_OF_ACCELERATOR = 4e6, 64e6
"""Most elements of the parameters of a network that is checked by default."""
PRODUCTS, PRODUCTS_OF_ACCELERATOR = 1.5e8, 1.5e10
"""Most products of a forward pass on the global batch: about 30 ms on one core, beside 80 ms to 5 s of a capture."""

_checked: weakref.WeakKeyDictionary[AutoParallel, weakref.WeakSet[nn.Module]] = weakref.WeakKeyDictionary()
"""AutoParallel -> the networks whose first step was checked, or was found too large"""
_functions: weakref.WeakKeyDictionary[AutoParallel, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()
"""AutoParallel -> the code that `value_and_grad` has run for it: finding its networks takes longer"""


def check_first_call(
    parallel: AutoParallel, network: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Compare the first training call of a module with that of one process; later ones pass by."""
    if is_verifying.get() or not (network.training and torch.is_grad_enabled()):
        return
    if _is_to_be_checked(parallel, network, args, kwargs):
        _check(parallel, lambda comparison: comparison.compare_module(network, args, kwargs))


def check_first_gradients(parallel: AutoParallel, call: Differentiation) -> None:
    """Compare what `value_and_grad` gives in a step function's first step with that of one process."""
    code = getattr(call.function, "__code__", call.function)
    known = _functions.setdefault(parallel, weakref.WeakSet())
    if is_verifying.get() or code in known:
        return
    known.add(code)
    if _is_to_be_checked(parallel, root_of(parallel, call.function), call.args, call.kwargs):
        _check(parallel, lambda comparison: comparison.compare_function(call))


def _is_to_be_checked(parallel: AutoParallel, root: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    known = _checked.get(parallel)
    if known is not None and root in known:
        return False
    settings, ranks = parallel.settings, world.get_group_size()
    if ranks == 1 or settings.is_lone or world.simulation_level() is not None:
        return False
    wanted = os.environ.get(contract.MSRUN_VERIFY, "")
    if wanted == "0" or (not wanted and settings.checks_first_step is False):
        return False
    if parallel.engine.has_waited:
        log.debug("the first step does not check itself: no_sync() adds gradients up that the check would send")
        return False
    _checked.setdefault(parallel, weakref.WeakSet()).add(root)
    if wanted or settings.checks_first_step:
        return True
    on_cpu = world.device().type == "cpu"
    tensors = find_tensors(args, kwargs)
    elements = sum(parameter.numel() for parameter in root.parameters())
    products = count_products(root, tensors) * (ranks if settings.is_replicated else settings.batch_parts(ranks))
    if elements > (ELEMENTS if on_cpu else ELEMENTS_OF_ACCELERATOR):
        log.debug("the first step does not check itself: %.0f parameters; MSRUN_VERIFY=1 checks any network", elements)
        return False
    if products > (PRODUCTS if on_cpu else PRODUCTS_OF_ACCELERATOR):
        log.debug("the first step does not check itself: about %.1e products; MSRUN_VERIFY=1 checks any step", products)
        return False
    return True


def _check(parallel: AutoParallel, compare: Callable[[Comparison], VerificationReport]) -> None:
    """Compare; a captured step that differs is an error, one of whole replicas a warning: torch's users know them."""
    is_asked = bool(os.environ.get(contract.MSRUN_VERIFY))
    is_speaker = world.get_rank() == 0
    try:
        with verifying():
            report = compare(Comparison(parallel, None))
    except UnverifiableError as error:
        if is_speaker and is_asked:
            log.warning("MSRUN_VERIFY: the first step was not verified: %s", error)
        elif is_speaker:
            log.debug("the first step does not check itself: %s", error)
        return
    if is_speaker and is_asked:
        (log.info if report.is_equal else log.error)("%s", report)
    if report.is_captured or is_asked:
        report.raise_if_different()
    elif not report.is_equal and is_speaker:
        log.warning(
            "%s is not one process here: %s: %s",
            parallel.settings.parallel_mode,
            report.describe_difference(),
            report.remedy,
        )


def count_products(root: nn.Module, tensors: Sequence[Tensor]) -> float:
    """Return about how many products a forward pass computes: a weight meets every row, token or pixel of the batch.

    It needs no run. A weight of a convolution meets every pixel, any other one of images every 64th.
    """
    rows = pixels = 1
    for tensor in tensors:
        if tensor.dim() > 3:
            pixels = max(pixels, tensor.numel() // max(1, tensor.shape[1]))
            rows = max(rows, tensor.shape[0], pixels // 64)
        elif tensor.dim() == 3:
            rows = max(rows, tensor.numel() // max(1, min(tensor.shape[1], tensor.shape[2])))
        elif tensor.dim():
            is_tokens = tensor.dim() == 2 and not tensor.is_floating_point()
            rows = max(rows, tensor.numel() if is_tokens else tensor.shape[0])
    looked_up = {id(m.weight) for m in root.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    weights = [parameter for parameter in root.parameters() if id(parameter) not in looked_up]
    return float(sum(p.numel() * (max(rows, pixels) if p.dim() > 2 else rows) for p in weights))
