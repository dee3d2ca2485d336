"""Compilation: one call of a network becomes the local program of this rank, equal on all ranks."""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, fx

from msrun.errors import CaptureError, ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.agreement import gather
from msrun.runtime.capture.aten import apply_autocast
from msrun.runtime.capture.batch_rows import refuse_lost_rows
from msrun.runtime.capture.capture import capture
from msrun.runtime.capture.captured_graph import CapturedGraph, Target
from msrun.runtime.capture.dynamo import TracedCall
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.batch.divided_batch import DividedBatch, find_parts, find_wrappers
from msrun.runtime.parallel.batch.parts import BatchParts, find_tensors
from msrun.runtime.parallel.compilation.compiled import CompiledCall, ProgramCall, activations_of, build_compiled_call
from msrun.runtime.parallel.given_strategies import strategies_of
from msrun.runtime.parallel.host_operators import choose_host_operators, keep_host_operators, targets_in
from msrun.runtime.parallel.parameters.fusion import describe_overlap
from msrun.runtime.parallel.parameters.storage import ParameterStorage, StageHolders
from msrun.runtime.parallel.plan import ParallelPlan, build_parallel_plan
from msrun.runtime.parallel.precision import autocast
from msrun.runtime.parallel.recomputation import choose_recomputed, recomputed_in
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.strategy_file import ChosenStrategies, choose_strategies
from msrun.runtime.partition.borders import place_operators
from msrun.runtime.partition.decide import Constraints, decide
from msrun.runtime.partition.partition import lower
from msrun.runtime.partition.program import Decisions, LocalProgram
from msrun.runtime.partition.reads import entry_layout
from msrun.runtime.schedule.replay import RecomputeSpec, find_regions
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.named_layout import Layout, choose_mesh
from msrun.runtime.sharding.sizes import settle, settled
from msrun.runtime.sharding.strategies import Entry, entry_numbers

_OF_PROCESS = re.compile(r" at 0x[0-9a-f]+|'(number|first_rank)': \d+")


@dataclass(frozen=True)
class Draft:
    """A captured and partitioned call, before its parameters are placed: the same on every rank."""

    captured: CapturedGraph
    program: LocalProgram
    parts: BatchParts
    recompute: Mapping[str, RecomputeSpec]
    chosen: ChosenStrategies

    @property
    def stages(self) -> StageHolders | None:
        """Who holds which parameter; None: every rank holds its part of all."""
        return None

    def build(self, compilation: Compilation) -> tuple[ProgramCall, ParallelPlan]:
        """Place the parameters and make the program run; returns what runs it and what was decided."""
        return compilation.build(self)

    def finish(self, call: ProgramCall, plan: ParallelPlan) -> ParallelPlan:  # noqa: ARG002
        """Return the plan, when all ranks are ready to run. All ranks call it together."""
        return plan

    def describe(self, tensors: Sequence[Tensor]) -> str:
        """Return the program, its inputs and how it is run as text that is equal on all ranks that run the same."""
        nodes = [describe_node(n) for n in self.program.graph.nodes]
        inputs = [f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for tensor in tensors]
        again = [
            f"{path} {spec.mp_comm_recompute} {spec.parallel_optimizer_comm_recompute}"
            for path, spec in self.recompute.items()
        ]
        return "\n".join([*nodes, *inputs, str(self.parts), *again])


@dataclass
class Compilation:
    """Compiles calls of one network. All ranks compile the same calls in the same order."""

    target: Target
    settings: ParallelSettings
    mesh: Mesh
    rank: int
    storage: ParameterStorage
    layouts: list[Layout] = field(default_factory=list)
    """Named layouts that the user gave, in order: their names are those of the plan."""
    traced: list[TracedCall] = field(default_factory=list)
    """Traces that leave sizes free, the one that was used last first."""
    trace_count: int = 0
    keeps_sizes: bool = True
    """Whether sizes that differ are symbols until a program is made."""
    _varying: dict[Any, tuple[list[tuple[int, ...]], set[tuple[int, int]] | None]] = field(default_factory=dict)
    """types of a call's tensors -> sizes of the first such call, and which (tensor, dimension) has had others since;
    None: its Python code wants numbers"""
    _told: ParallelError | None = None
    """What every rank has heard of already."""

    def find_wrappers(self) -> list[DividedBatch]:
        """Return the wrappers of the network that divide its batch, outermost first. All ranks call it together."""
        with self.failing_together():
            return find_wrappers(self.target.root)

    def draft(
        self, wrappers: list[DividedBatch], args: Sequence[Any], kwargs: Mapping[str, Any], *, is_placed: bool = True
    ) -> Draft:
        """Return the graph and the local program for arguments of these shapes; exchanges nothing.

        Args:
            wrappers: those of the network that divide its batch.
            is_placed: the operators get their places on the host and the device; else the caller does that.
        """
        parts = find_parts(wrappers)
        recompute = recomputed_in(self.target.root)
        host_inputs = host_inputs_of(find_tensors(args, kwargs))
        settings = self.settings
        limits = (settings.device_limit, settings.activation_limit_bytes, settings.compiler)
        may_keep = self.keeps_sizes and is_placed and limits == (None, None, None)  # whose answers need numbers
        for keeps_sizes in (True, False) if may_keep else (False,):
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", message="Raw Sym")  # until they are settled, no graph is run
                    captured, decisions, chosen = self.decide(args, kwargs, parts, wrappers, keeps_sizes=keeps_sizes)
                    lowered = partial(_lowered, captured, decisions, chosen.notes)
                    program = self._place(lowered, host_inputs, parts) if is_placed else lowered()
            except Exception as error:
                has_symbols = keeps_sizes and any(varying for _, varying in self._varying.values())
                if not has_symbols or error is self._told:
                    raise
            else:
                break
        if may_keep:  # else something in it wants numbers
            self.keeps_sizes = keeps_sizes and (not captured.sizes or captured.sizes[-1].is_free)
        return Draft(captured, program, parts, recompute, chosen)

    def build(self, draft: Draft) -> tuple[CompiledCall, ParallelPlan]:
        """Place the parameters and make the program run; returns what runs it and what was decided."""
        program, recompute = draft.program, draft.recompute
        self.place(draft)
        limit = self.settings.activation_limit_bytes
        if limit is not None:
            try:
                recompute = choose_recomputed(
                    program, recompute, limit, lambda specs: self.build_call(draft, program, specs).activations()
                )
            except StrategyError as error:
                if self.settings.search is None:
                    raise
                raise StrategyError(f"no searched strategy fits into the device: {error}") from None
            program.notes.append(f"recompute auto: {', '.join(map(user_name, recompute)) or 'nothing needs to be'}")
        compiled = self.build_call(draft, program, recompute)
        if draft.parts.micro_batches > 1 and len(program.outputs) > 1:
            program.notes.append("GradAccumulation: gradients flow from the first result, the loss, only")
        self.note_calls(program, recompute, [compiled])
        return compiled, self.plan_of(compiled, draft)

    def place(self, draft: Draft, stages: StageHolders | None = None) -> None:
        """Give every rank its parts of the parameters that a program reads, and say so in its notes."""
        program, self.settings = draft.program, draft.chosen.settings
        program.notes += self.settings.notes
        program.notes += [
            f"{user_name(use.name)}: the rows that a batch names travel; how many only the run can tell"
            for use in program.parameters.values()
            if use.has_row_gradient
        ]
        program.notes += self.storage.place(program, stages)

    def build_call(
        self,
        draft: Draft,
        program: LocalProgram,
        recompute: Mapping[str, RecomputeSpec],
        memory_of: Mapping[str, str] | None = None,
        *,
        defers_weights: bool = False,
    ) -> CompiledCall:
        """Return what runs a program, or one stage of it; the parameters have been placed.

        Args:
            memory_of: value -> the parameter whose memory it is, by name; None: to be found, of a whole program.
            defers_weights: weights' gradients are computed when the schedule of a pipeline says.
        """
        buffers = dict(self.target.root.named_buffers())
        return build_compiled_call(
            draft.captured,
            program,
            self.storage.stored,
            buffers,
            mesh=self.mesh,
            rank=self.rank,
            settings=self.settings,
            parts=draft.parts,
            recompute=recompute,
            memory_of=memory_of,
            defers_weights=defers_weights,
        )

    def note_calls(
        self, program: LocalProgram, recompute: Mapping[str, RecomputeSpec], calls: Collection[CompiledCall]
    ) -> None:
        """Say in the notes of a program which weights are deferred, and what of the user's wishes came to nothing.

        Args:
            calls: those whose weights' gradients are computed while gradients of inputs travel, if the user wants so.
        """
        if self.settings.overlaps_weights and calls:
            program.notes.append(describe_overlap(sum(call.deferred_layers for call in calls)))
        unused = sorted(set(recompute) - {region.path for region in find_regions(program, recompute)})
        if unused:
            program.notes.append(f"recomputed modules that the graph does not call: {', '.join(unused)}")

    def plan_of(self, call: ProgramCall, draft: Draft) -> ParallelPlan:
        """Return what was decided; what a step moves is not told yet."""
        return build_parallel_plan(
            call,
            self.storage,
            settings=self.settings,
            mesh=self.mesh,
            layouts=self.layouts,
            price=draft.chosen.price,
        )

    def decide(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        parts: BatchParts,
        wrappers: Sequence[DividedBatch],
        *,
        keeps_sizes: bool = False,
    ) -> tuple[CapturedGraph, Decisions, ChosenStrategies]:
        """Return the graph of one copy of one micro batch, and how it is cut.

        Args:
            keeps_sizes: sizes that differ from call to call are symbols in the graph until the program is made.
        """
        tensors = find_tensors(args, kwargs)
        strategies = strategies_of(self.target.root)
        self._settle_mesh(layout for strategy in strategies.values() for layout in strategy.layouts)
        shapes = self.shapes_of(tensors, parts)
        precision = self.settings.precision
        targets = targets_in(self.target.root)

        def traced(free: Collection[tuple[int, int]]) -> CapturedGraph:
            return capture(
                self.target,
                args,
                kwargs,
                input_shapes=shapes,
                parameter_shapes={name: found.shape for name, found in self.storage.placed.items()},
                strategies=strategies,
                targets=targets,
                wrappers=wrappers,
                known=[each for each in self.traced if each.holds(self.target.call, tuple(args), dict(kwargs))],
                free=free,
                keeps_sizes=keeps_sizes,
            )

        with autocast(precision):
            captured = self._traced_once(traced, tensors, shapes, keeps_sizes=keeps_sizes)
        if captured.stored and parts.total > 1:
            raise CaptureError(
                f"the network stores tensors in attributes, and {parts.total} parts of the batch would each store "
                "their own: register them as buffers, return them, or do not divide the batch"
            )
        refuse_lost_rows(captured.graph, parts.total)
        self._settle_mesh(layout for region in captured.regions for layout in region.strategy.layouts)
        layouts = [self._input_layout(index, tensor) for index, tensor in enumerate(tensors)]
        half = precision.torch_dtype if precision else None
        apply_autocast(captured.graph, captured.parameters, world.device().type, half)
        constraints = Constraints(
            input_layouts=layouts,
            output_batch_axes=self.mesh.axes if self.settings.dataset_strategy == "data_parallel" else (),
            differentiable_inputs=frozenset(i for i, tensor in enumerate(tensors) if tensor.requires_grad),
            stored={name: found.used for name, found in self.storage.placed.items()},
            is_strict=self.settings.is_strict,
        )
        with settled(captured.graph) if captured.sizes else nullcontext():
            chosen = choose_strategies(captured, self.mesh, constraints, self.settings, self.target.root, self._fewest)
        self.storage.use_hsdp(chosen.settings.hsdp)
        return captured, decide(captured, self.mesh, replace(constraints, splits=chosen.splits)), chosen

    def _traced_once(
        self,
        traced: Callable[[Collection[tuple[int, int]]], CapturedGraph],
        tensors: Sequence[Tensor],
        shapes: list[tuple[int, ...]],
        *,
        keeps_sizes: bool,
    ) -> CapturedGraph:
        """Return the graph of a call; what has been traced for other sizes is not traced again.

        Args:
            traced: returns it, with a trace that leaves sizes of (tensor, dimension) free if there has to be a new one.
            keeps_sizes: who calls this tries it without symbols, too.
        """
        varying = self._note_varying(tensors, shapes)
        try:
            graph = traced(varying or ())
        except Exception:
            if not varying or keeps_sizes:
                raise
            graph = traced(())
            self._set_varying(tensors, None)  # its Python code wants numbers
        trace = next((each for each in self.traced if each.is_of(graph.traced)), None)
        if trace is None:
            self.trace_count += 1
            trace = graph.traced
        else:
            self.traced.remove(trace)
        if trace.free:
            self.traced.insert(0, trace)
            del self.traced[self.settings.kept_captures :]
        return graph

    def _note_varying(self, tensors: Sequence[Tensor], shapes: list[tuple[int, ...]]) -> set[tuple[int, int]] | None:
        """Return which sizes of a call's tensors have differed so far; None: its Python code wants numbers."""
        first, varying = self._varying.setdefault(_kinds(tensors), (shapes, set()))
        if varying is None:
            return None
        for index, (before, now) in enumerate(zip(first, shapes, strict=True)):
            varying |= {(index, dimension) for dimension in getattr(tensors[index], "_dynamo_dynamic_indices", ())}
            varying |= {(index, dimension) for dimension in range(len(now)) if now[dimension] != before[dimension]}
        return varying

    def _set_varying(self, tensors: Sequence[Tensor], varying: set[tuple[int, int]] | None) -> None:
        self._varying[_kinds(tensors)] = self._varying[_kinds(tensors)][0], varying

    def state_for(self, tensors: Sequence[Tensor], parts: BatchParts) -> tuple[Any, ...]:
        """Return what earlier calls have left that decides what becomes of a call with these tensors."""
        self._settle_mesh(layout for each in strategies_of(self.target.root).values() for layout in each.layouts)
        varying = self._note_varying(tensors, self.shapes_of(tensors, parts))
        storage = self.storage
        cut = {name: (found.shape, found.used) for name, found in storage.placed.items()}
        placed = cut, storage.on_host, storage.holders, storage.operators
        return self.settings, self.mesh, self.layouts, self.keeps_sizes, varying and sorted(varying), *placed

    def go_on_from(self, draft: Draft, tensors: Sequence[Tensor], state: tuple[Any, ...]) -> None:
        """Go on as after the draft of a call, which has left this state."""
        _, _, self.layouts, self.keeps_sizes, varying, *_ = state
        self._set_varying(tensors, None if varying is None else set(varying))
        self._settle_mesh(())
        self.storage.use_hsdp(draft.chosen.settings.hsdp)
        self.trace_count += 1

    def _place(self, lowered: Callable[[], LocalProgram], host_inputs: list[int], parts: BatchParts) -> LocalProgram:
        """Return the local program, with operators on the host where the user or a limit of memory wants them."""

        def placed(moved: Collection[str], *notes: str) -> LocalProgram:
            program = lowered()
            place_operators(program, stored=self.storage.on_host, host_inputs=host_inputs, moved=moved)
            program.notes += notes
            return program

        limit = self.settings.device_limit
        if limit is None:
            return placed(())
        program = lowered()
        if self.storage.on_host:
            moved, note = keep_host_operators(program, self.storage.on_host)
            return placed(moved, note)
        specs = recomputed_in(self.target.root)
        items = self.storage.decide(program)
        sizes = {name: limit.bytes_of(item, self.mesh) for name, item in items.items()}

        def device_bytes(moved: Collection[str]) -> int:
            program = placed(moved)
            kept = sum(size for name, size in sizes.items() if name not in program.host_parameters)
            return kept + activations_of(program, specs, parts.copies).peak_bytes

        moved, note = choose_host_operators(program, limit, sizes, device_bytes)
        return placed(moved, note)

    def _settle_mesh(self, layouts: Iterable[Layout]) -> None:
        """Give the mesh the axes of the user's device matrices; parameters that are stored already keep theirs."""
        config = self.settings.dataset_strategy
        given = [] if isinstance(config, str) else [entry for entry in config if isinstance(entry, Layout)]
        self.layouts = list(dict.fromkeys((*self.layouts, *given, *layouts)))
        self.mesh = self.storage.use_mesh(choose_mesh(self.mesh.size, self.layouts, self.mesh.first_rank), self.layouts)

    def place_in_batch(self, index: int, tensor: Tensor) -> tuple[tuple[int, ...], tuple[slice, ...]]:
        """Return the shape of the global batch's tensor `index`, and which part of it this rank passes."""
        layout = self._input_layout(index, tensor)
        shape = tuple(size * self.mesh.extent(axes) for size, axes in zip(tensor.shape, layout.split, strict=True))
        return shape, layout.slices(self.mesh, shape, self.rank)

    def _input_layout(self, index: int, tensor: Tensor) -> TensorLayout:
        strategy = self.settings.dataset_strategy
        if strategy == "full_batch" or tensor.dim() == 0:
            return TensorLayout.replicated(tensor.dim())
        if strategy == "data_parallel":
            return TensorLayout((self.mesh.axes, *((),) * (tensor.dim() - 1)))
        assert not isinstance(strategy, str), "checked by ParallelSettings"
        entry = strategy[index] if index < len(strategy) else ()
        numbers = entry_numbers(entry, self.mesh)
        if len(numbers) != tensor.dim():
            raise StrategyError(
                f"dataset_strategy: {entry or 'nothing'} for input {index} of {tensor.dim()} dimensions; "
                "give one tuple per input, one number per dimension"
            )
        shape = tuple(size * parts for size, parts in zip(tensor.shape, numbers, strict=True))
        what = f"dataset_strategy of input {index}"
        return entry_layout(entry, shape, self.mesh, what=what, order=self._order(strategy))

    def _order(self, strategy: Sequence[Entry]) -> Sequence[int] | None:
        """Return in which order the numbers of dataset_strategy take the axes of the mesh; None: from left to right.

        Source: in MindSpore ranks that get the same part are far apart: of 8 with 4 parts 0 and 4 (VirtualDatasetInfo
        sets repeated_num_in_dev_matrix_right_ to false).
        """
        if self.settings.compat != "mindspore":
            return None
        parts = max(math.prod(entry_numbers(entry, self.mesh)) for entry in strategy)
        copies, outermost = self.mesh.size // parts, list[int]()
        for axis in self.mesh.axes:
            if copies % self.mesh.extent((*outermost, axis)) == 0:
                outermost.append(axis)
        return [*(axis for axis in self.mesh.axes if axis not in outermost), *outermost]

    def shapes_of(self, tensors: Sequence[Tensor], parts: BatchParts) -> list[tuple[int, ...]]:
        """Return the global shapes of what one part of a batch has of these tensors."""
        layouts = [self._input_layout(index, tensor) for index, tensor in enumerate(tensors)]
        return [self._global_shape(tensor, layout, parts) for tensor, layout in zip(tensors, layouts, strict=True)]

    def _global_shape(self, tensor: Tensor, layout: TensorLayout, parts: BatchParts) -> tuple[int, ...]:
        shape = [size * self.mesh.extent(axes) for size, axes in zip(tensor.shape, layout.split, strict=True)]
        if shape:
            parts.check(tensor.shape[0])
            shape[0] //= parts.total
        return tuple(shape)

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Tell the other ranks of whatever is raised inside: they learn of it when they next compare their programs, or
        how far their searches have come."""
        try:
            yield
        except ParallelError as error:
            if error is not self._told:
                self.check_ranks_agree("", failure=str(error))
            raise
        except Exception as error:
            self.check_ranks_agree("", failure=f"{type(error).__name__}: {error}")
            raise

    def check_ranks_agree(self, program: str, failure: str = "", batch: str = "") -> None:
        """Refuse to start collectives that would not match: the same program must have come out on every rank.

        Args:
            failure: why this rank has none; it raises that itself afterwards.
            batch: what this rank was given, in words.
        """
        everyone = self.exchange((hash_text(program), batch), failure)
        others = [each if isinstance(each, tuple) else ("a search", batch) for each in everyone]
        different = [rank for rank, (other, _) in enumerate(others) if other != others[0][0]]
        if not different or failure:
            return
        rank, own, other = different[0], others[0][1], others[different[0]][1]
        if own != other:
            raise self._tell(
                f"rank {rank} got {other}, rank 0 {own}, so that their networks are not the same: give every rank "
                "batches of one shape (pad to one length, drop the last, smaller one)"
            )
        raise self._tell(
            f"rank {rank} captured another network than rank 0 of {own or 'the same batch'}: give every rank the same "
            "network, with the same settings, attributes and types"
        )

    def _tell(self, message: str) -> CaptureError:
        """Return an error that every rank raises."""
        self._told = told = CaptureError(message)
        return told

    def _fewest(self, count: int) -> int:
        """Return of how many plans each rank's search has found the fewest on any rank."""
        everyone = self.exchange(count)
        others = [rank for rank, other in enumerate(everyone) if not isinstance(other, int)]
        if others:
            raise self._tell(f"rank {others[0]} searches no strategies, others do: give every rank the same settings")
        return min(everyone)

    def exchange(self, value: Any, failure: str = "") -> list[Any]:
        """Return every rank's value; all ranks call it together, or with why they cannot."""
        everyone = gather((value, failure), what="the comparison of graphs")
        failed = [(rank, text) for rank, (_, text) in enumerate(everyone) if text]
        if failed and not failure:
            raise self._tell(f"rank {failed[0][0]} cannot run this call: {failed[0][1]}")
        return [value for value, _ in everyone]


def _lowered(captured: CapturedGraph, decisions: Decisions, notes: Sequence[str]) -> LocalProgram:
    """Return the program of a rank, with numbers in place of symbols."""
    program = lower(captured, decisions)
    if captured.sizes:
        settle(program.graph)
        settle(captured.graph)
    program.notes += notes
    return program


def _kinds(tensors: Sequence[Tensor]) -> Any:
    return tuple((tensor.dtype, tensor.dim()) for tensor in tensors)


def host_inputs_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return which of the user's tensors lie on the host beside an accelerator."""
    is_beside = world.device().type != "cpu"
    return [index for index, tensor in enumerate(tensors) if is_beside and tensor.device.type == "cpu"]


def describe_node(node: fx.Node) -> str:
    """Return a node as text that is equal in every process: without addresses in memory and the like."""
    return _OF_PROCESS.sub("", f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")


def hash_text(text: str) -> str:
    """Return a short digest, equal on every host."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
