"""Compilation: one call of a network becomes the local program of this rank, equal on all ranks."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from msrun.errors import CaptureError, ParallelError, StrategyError
from msrun.runtime import progress
from msrun.runtime.graph.capture import CapturedGraph, Target, capture
from msrun.runtime.graph.partition import LocalProgram, partition
from msrun.runtime.graph.regions import RecomputeSpec
from msrun.runtime.layout import Mesh, TensorLayout, assign_axes
from msrun.runtime.parallel.compiled import CompiledCall, build_compiled_call
from msrun.runtime.parallel.divided_batch import Tracing, current_tracing, find_parts, find_wrappers
from msrun.runtime.parallel.parts import BatchParts
from msrun.runtime.parallel.plan import ParallelPlan, build_parallel_plan, user_name
from msrun.runtime.parallel.recompute import recomputed_in
from msrun.runtime.parallel.recompute_search import choose_recomputed
from msrun.runtime.parallel.scaling import scales
from msrun.runtime.parallel.settings import ParallelSettings
from msrun.runtime.parallel.shard import strategies_of
from msrun.runtime.parallel.storage import ParameterStorage

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


@dataclass
class Compilation:
    """Compiles calls of one network. All ranks compile the same calls in the same order."""

    target: Target
    settings: ParallelSettings
    mesh: Mesh
    rank: int
    storage: ParameterStorage

    def compile(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[CompiledCall, ParallelPlan]:
        """Return the program for arguments of these shapes, and what was decided.

        Raises:
            CaptureError: the network cannot be captured, here or on another rank, or is not the same on all ranks.
            StrategyError: an illegal strategy.
        """
        tensors = find_tensors(args, kwargs)
        try:
            wrappers = find_wrappers(self.target.root)
            parts = find_parts(wrappers)
            recompute: Mapping[str, RecomputeSpec] = recomputed_in(self.target.root)
            captured, program = self._capture(args, kwargs, tensors, parts, Tracing(wrappers))
        except ParallelError as error:
            self._check_ranks_agree("", failure=str(error))
            raise
        nodes = [describe_node(n) for n in program.graph.nodes]
        inputs = [f"{tuple(tensor.shape)} {tensor.dtype} {tensor.requires_grad}" for tensor in tensors]
        again = [f"{path} {s.mp_comm_recompute} {s.parallel_optimizer_comm_recompute}" for path, s in recompute.items()]
        self._check_ranks_agree("\n".join([*nodes, *inputs, str(parts), *again]))
        program.notes += self.storage.place(program)
        build = self._builder(captured, program, parts)
        limit = self.settings.activation_limit_bytes
        if limit is not None:
            recompute = choose_recomputed(program, recompute, limit, lambda specs: build(specs).activations())
            program.notes.append(f"recompute auto: {', '.join(map(user_name, recompute)) or 'nothing needs to be'}")
        compiled = build(recompute)
        unused = sorted(set(recompute) - {region.path for region in compiled.regions})
        if unused:
            program.notes.append(f"recomputed modules that the graph does not call: {', '.join(unused)}")
        if parts.micro_batches > 1 and len(program.outputs) > 1:
            program.notes.append("GradAccumulation: gradients flow from the first result, the loss, only")
        return compiled, build_parallel_plan(compiled, self.storage, settings=self.settings, mesh=self.mesh)

    def _builder(
        self, captured: CapturedGraph, program: LocalProgram, parts: BatchParts
    ) -> Callable[[Mapping[str, RecomputeSpec]], CompiledCall]:
        """Return what makes the compiled call when it is known which modules are recomputed."""
        level = self.settings.hsdp.optimizer_level if self.settings.hsdp else "level1"
        factors = scales(self.settings.compat, parts.copies, parts.micro_batches)
        return lambda recompute: build_compiled_call(
            captured,
            program,
            self.storage.stored,
            dict(self.target.root.named_buffers()),
            mesh=self.mesh,
            rank=self.rank,
            copies=parts.copies,
            scale=factors.loss,
            regathers=level == "level3",
            scatters=level != "level1",
            parts=parts,
            gradient_scale=factors.gradient,
            fusion=self.settings.comm_fusion,
            recompute=recompute,
        )

    def _capture(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        tensors: Sequence[Tensor],
        parts: BatchParts,
        tracing: Tracing,
    ) -> tuple[CapturedGraph, LocalProgram]:
        layouts = [self._input_layout(index, tensor) for index, tensor in enumerate(tensors)]
        shapes = [self._global_shape(tensor, layout, parts) for tensor, layout in zip(tensors, layouts, strict=True)]
        current = current_tracing.set(tracing)
        try:
            captured = capture(
                Target(tracing.watch(self.target.call), self.target.root),
                args,
                kwargs,
                input_shapes=shapes,
                parameter_shapes=self.storage.shapes,
            )
        finally:
            current_tracing.reset(current)
        program = partition(
            captured,
            self.mesh,
            input_layouts=layouts,
            strategies=strategies_of(self.target.root),
            output_batch_axes=self.mesh.axes if self.settings.dataset_strategy == "data_parallel" else (),
            differentiable_inputs=frozenset(i for i, tensor in enumerate(tensors) if tensor.requires_grad),
        )
        return captured, program

    def _input_layout(self, index: int, tensor: Tensor) -> TensorLayout:
        strategy = self.settings.dataset_strategy
        if strategy == "full_batch" or tensor.dim() == 0:
            return TensorLayout.replicated(tensor.dim())
        if strategy == "data_parallel":
            return TensorLayout((self.mesh.axes, *((),) * (tensor.dim() - 1)))
        if index >= len(strategy) or len(strategy[index]) != tensor.dim():
            given = strategy[index] if index < len(strategy) else "nothing"
            raise StrategyError(
                f"dataset_strategy: {given} for input {index} of {tensor.dim()} dimensions; "
                "give one tuple per input, one number per dimension"
            )
        return TensorLayout(assign_axes(self.mesh, strategy[index], what=f"dataset_strategy of input {index}"))  # type: ignore[arg-type]

    def _global_shape(self, tensor: Tensor, layout: TensorLayout, parts: BatchParts) -> tuple[int, ...]:
        shape = [size * self.mesh.extent(axes) for size, axes in zip(tensor.shape, layout.split, strict=True)]
        if shape:
            parts.check(tensor.shape[0])
            shape[0] //= parts.total
        return tuple(shape)

    def _check_ranks_agree(self, program: str, failure: str = "") -> None:
        """Refuse to start collectives that would not match: the same program must have come out on every rank.

        Args:
            failure: why this rank has none; it raises that itself afterwards.
        """
        everyone: list[Any] = [None] * self.mesh.size
        with progress.waiting_in(lambda: f"the comparison of graphs by {len(everyone)} ranks"):
            dist.all_gather_object(everyone, (hash_text(program), failure))
        if failure:
            return
        failed = [(rank, text) for rank, (_, text) in enumerate(everyone) if text]
        if failed:
            raise CaptureError(f"rank {failed[0][0]} cannot run this call: {failed[0][1]}")
        different = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
        if different:
            raise CaptureError(
                f"rank {different[0]} captured another network than rank 0: give every rank the same network and "
                "equal batch shapes"
            )


def find_tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments of a call, in order."""
    return [leaf for leaf in pytree.tree_leaves((tuple(args), dict(kwargs))) if isinstance(leaf, Tensor)]


def describe_node(node: fx.Node) -> str:
    """Return a node as text that is equal in every process: without addresses in memory."""
    return _ADDRESS.sub("", f"{node.op} {node.name} {node.target} {node.args} {node.kwargs}")


def hash_text(text: str) -> str:
    """Return a short digest, equal on every host."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]
