"""The parameters of one network on this rank: decided once, at the first capture, and put in place."""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence, Set
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from msrun.errors import StrategyError
from msrun.runtime import world
from msrun.runtime.execute.placement import PlacedParameter, Placement, chunk_bounds, placement_of, placements
from msrun.runtime.nn.deferred_init import deferred_tensors, replay_deferred, tape_states
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.parameters.fusion import fusion_id_of
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.partition.program import LocalProgram, ParameterUse
from msrun.runtime.parts.part import become_part, exchange_state
from msrun.runtime.progress import waiting_in
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.sharding.named_layout import Layout
from msrun.runtime.tensors.plain_tensors import plain, put_value

after_placement: ContextVar[Callable[[], None] | None] = ContextVar("after_placement", default=None)
"""Called when a network's parameters and buffers have been put in place, before its first run."""


def note_placed() -> None:
    """Say that a network's parameters and buffers are in place."""
    look = after_placement.get()
    if look is not None:
        look()


@dataclass(frozen=True)
class StageHolders:
    """Which stages of a pipeline hold which parameters and run which operators."""

    holders: Mapping[str, tuple[int, ...]]
    """parameter name -> stages that read it"""
    own: tuple[int, ...]
    """Stages of this rank."""
    rank_of: Sequence[int] = ()
    """stage -> the pipeline rank that runs it"""
    operators: Mapping[str, int] = field(default_factory=dict)
    """operator of the first capture -> its stage, as `StageAssignment.by_name` names it"""

    def ranks(self, name: str) -> tuple[int, ...]:
        """Return the pipeline ranks of the stages that hold a parameter, ascending."""
        return tuple(sorted({self.rank_of[stage] for stage in self.holders.get(name, ())}))

    def is_held(self, name: str) -> bool:
        """Return whether this rank holds a parameter; those that no stage reads are everywhere."""
        stages = self.holders.get(name, ())
        return not stages or bool(set(stages) & set(self.own))


class ParameterStorage:
    """Knows how every parameter is stored and has put its part into the user's own parameter object."""

    def __init__(self, root: nn.Module, mesh: Mesh, rank: int, hsdp: HsdpSpec | None) -> None:
        self._root = root
        self._mesh = mesh
        self._rank = rank
        self._hsdp = hsdp
        self._stages = StageHolders({}, ())
        self.stored: dict[str, PlacedParameter] = {}

    @property
    def placed(self) -> dict[str, Placement]:
        """Placement of every parameter that is stored already."""
        named = self._root.named_parameters()
        return {name: found for name, value in named if (found := placement_of(value)) is not None}

    @property
    def holders(self) -> dict[str, tuple[int, ...]]:
        """Stages of every parameter that a pipeline has placed already."""
        return {name: found.stages for name, found in self.placed.items() if found.stages}

    @property
    def operators(self) -> Mapping[str, int]:
        """Stage of every operator of the first capture that a pipeline has placed, by its name."""
        return self._stages.operators

    @property
    def on_host(self) -> dict[str, bool]:
        """Whether a parameter lies on the host, of every one that is stored already."""
        return {name: found.on_host for name, found in self.placed.items()}

    def decide(self, program: LocalProgram) -> dict[str, PlacedParameter]:
        """Return how every parameter is stored, or would be for this program."""
        return self.stored if self._is_complete else self._decide_all(program)

    def use_hsdp(self, hsdp: HsdpSpec | None) -> None:
        """Store parameters that are not stored yet as this optimizer parallel says."""
        self._hsdp = hsdp

    def use_mesh(self, mesh: Mesh, layouts: Sequence[Layout]) -> Mesh:
        """Store on this mesh, or on the one on which parameters of the network are stored already; returns it."""
        placed = [placement.mesh for placement in self.placed.values()]
        if placed and placed[0].ranks != mesh.ranks:
            raise StrategyError(
                "the parameters are placed already, by another AutoParallel with another number of stages: give both "
                "the same pipeline(stages=...)"
            )
        if placed and placed[0] != mesh:
            own = {placed[0].size, *(placed[0].stride(axis) for axis in placed[0].axes)}
            strange = next((layout for layout in layouts if not layout.strides <= own), None)
            if strange is not None:
                raise StrategyError(
                    f"{strange}: the parameters are stored on a mesh of {placed[0].shape} since an earlier call, which "
                    "has no such axes; give every Layout before the first call"
                )
            mesh = placed[0]
        self._mesh = mesh
        return mesh

    def place(self, program: LocalProgram, stages: StageHolders | None = None) -> list[str]:
        """Store the parameters that `program` uses, once it is checked.

        Returns notes for the plan. All ranks call it together.

        Args:
            stages: of a pipeline; parameters of other stages than this rank's lose their memory.
        """
        if self._is_complete:
            return []
        self._stages = stages or self._stages
        self.stored = stored = self._decide_all(program)
        new = {name: item.placement for name, item in stored.items() if placement_of(item.parameter) is None}
        notes = self._agree(new.keys())
        self._fill(new)
        for name, placement in new.items():
            if placement.is_cut:
                become_part(stored[name].parameter, placement)
            else:
                placements[stored[name].parameter] = placement
        exchange_state(self._root)
        note_placed()
        return notes

    def check(self, program: LocalProgram, stages: StageHolders | None = None) -> None:
        """Refuse a program that uses parameters otherwise than they are stored; exchanges nothing."""
        self._check_stages(stages)
        self._check_same(program, self.decide(program))

    @property
    def _is_complete(self) -> bool:
        """False before the first call, and after the user has put other parameters into the network."""
        own = dict(self._root.named_parameters())
        return bool(self.stored) and {name: id(value) for name, value in own.items()} == {
            name: id(stored.parameter) for name, stored in self.stored.items()
        }

    def _decide_all(self, program: LocalProgram) -> dict[str, PlacedParameter]:
        return {
            name: self._decide(name, parameter, program.parameters.get(name), on_host=name in program.host_parameters)
            for name, parameter in self._root.named_parameters()
        }

    def _decide(
        self, name: str, parameter: nn.Parameter, use: ParameterUse | None, *, on_host: bool
    ) -> PlacedParameter:
        placed = placement_of(parameter)
        if placed is not None:
            return PlacedParameter(name, parameter, placed, fusion_id_of(parameter))
        shape = tuple(parameter.shape)
        used = use.layout if use is not None else TensorLayout.replicated(len(shape))
        axes, reason = choose_shard_axes(
            self._hsdp,
            self._mesh,
            used,
            shape,
            parameter.element_size(),
            opted_out=getattr(parameter, "parallel_optimizer", True) is False,
            partial_axes=use.partial_axes if use is not None else (),
        )
        if use is None:
            axes, reason = (), "the graph does not use it"
        elif use.has_row_gradient and self._hsdp is not None:
            axes, reason = (), "its gradient has rows alone, of which no rank keeps a part"
        placed = Placement(
            user_name(name),
            shape,
            used,
            axes,
            reason,
            self._mesh,
            self._rank,
            world.get_group_size(),
            self._stages.holders.get(name, ()),
            self._stages.ranks(name),
            self._stages.is_held(name),
            on_host,
            chunk_bounds(shape[0], parts) if axes and shape[0] % (parts := self._mesh.extent(axes)) else (),
        )
        return PlacedParameter(name, parameter, placed, fusion_id_of(parameter))

    def _check_same(self, program: LocalProgram, stored: Mapping[str, PlacedParameter]) -> None:
        for name, use in program.parameters.items():
            used = stored[name].placement.used
            if use.layout != used:
                raise StrategyError(
                    f"parameter {name}: this call uses it as {use.layout.numbers(self._mesh)} but it is stored as "
                    f"{used.numbers(self._mesh)} since the first call; use it alike in every call"
                )

    def _check_stages(self, stages: StageHolders | None) -> None:
        """Refuse a later program that reads parameters elsewhere than where the first one has put them."""
        for name, parameter in self._root.named_parameters():
            wanted = stages.holders.get(name, ()) if stages is not None else ()
            placed = placement_of(parameter)
            if placed is not None and not set(wanted) <= set(placed.stages):
                where = f"stages {placed.stages}" if placed.stages else "no stage, as the first call did not use it"
                raise StrategyError(
                    f"parameter {name}: this call reads it in stages {wanted} but it is in {where}; make the first "
                    "call one that uses every parameter where training does"
                )

    def _fill(self, new: Mapping[str, Placement]) -> None:
        """Replace every parameter's whole value, or its missing one, by this rank's part."""
        deferred = deferred_tensors(self._root)

        def cut(name: str, whole: Tensor) -> Tensor:
            return new[name].cut(whole) if name in new else whole  # a buffer is whole on every rank

        on_host = {name for name, placement in new.items() if placement.on_host}
        for name, value in list(replay_deferred(self._root, cut, on_host)):
            put_value(deferred[name], value)
        for name, placement in new.items():
            parameter = self.stored[name].parameter
            if name in deferred:
                continue
            if placement.on_host and parameter.device.type != "cpu":
                put_value(parameter, placement.cut(parameter.detach()).cpu())
            elif placement.is_cut:
                put_value(parameter, placement.cut(parameter.detach()).clone())

    def _agree(self, new: Set[str]) -> list[str]:
        """Make every rank start from rank 0's values: seeds may differ, models must not."""
        notes: list[str] = []
        deferred = deferred_tensors(self._root)
        tapes = tape_states(self._root)
        named = [*self._root.named_parameters(), *self._root.named_buffers()]
        present = {n: t for n, t in named if n not in deferred and (n in new or n not in self.stored)}
        states = [torch.cat([seed for seed in tape.seeds if seed is not None]) for tape in tapes]
        equal = equal_everywhere([*states, *(plain(tensor) for tensor in present.values())])
        for tape, is_equal in zip(tapes, equal[: len(tapes)], strict=True):
            if not is_equal:
                of_rank_0 = [tape.seeds]
                with waiting_in(lambda: "broadcast of a parameter's values"):
                    dist.broadcast_object_list(of_rank_0, 0)
                tape.use_seeds(of_rank_0[0])
                notes.append("the ranks had different random seeds: rank 0's is used for the initial weights")
        different = []
        for (name, tensor), is_equal in zip(present.items(), equal[len(tapes) :], strict=True):
            if not is_equal:
                value = plain(tensor).contiguous()
                with waiting_in(lambda: "broadcast of a parameter's values"):
                    dist.broadcast(value, 0)
                tensor.data = value
                different.append(name)
        if different:
            notes.append(
                f"{len(different)} parameters or buffers differed between ranks ({different[0]}, ...): "
                "rank 0's are used"
            )
        return notes


def equal_everywhere(tensors: Sequence[Tensor]) -> list[bool]:
    """Return for each tensor whether all ranks hold the same bytes; one small all-reduce for all of them."""
    if not tensors:
        return []
    digests = torch.tensor([digest(tensor) for tensor in tensors], dtype=torch.int32, device=world.device())
    extremes = torch.stack([digests, ~digests])
    with waiting_in(lambda: "the comparison of parameters"):
        dist.all_reduce(extremes, dist.ReduceOp.MAX)
    return (extremes[0] == ~extremes[1]).all(-1).tolist()  # the highest value is the lowest one


_CHUNK_BYTES = 1 << 20


def digest(tensor: Tensor) -> tuple[int, ...]:
    """Return 128 bits that change with any bit of a tensor, with its shape and its type; needs memory for one chunk.

    Each 32-bit word of a chunk is multiplied by random 64 bits of its place and the products are added up, twice: two
    chunks that differ have equal sums with a probability below 2**-64. That runs where the tensor lies, faster than
    any cryptographic hash, which sees the sums only.
    """
    dense = tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()
    flat = dense.resolve_conj().resolve_neg().reshape(-1).contiguous().view(torch.uint8)
    keys = _keys(flat.device)
    products, padded = torch.empty_like(keys), flat.new_empty(_CHUNK_BYTES)
    sums = []
    for chunk in flat.split(_CHUNK_BYTES):
        count = -(-len(chunk) // 4)
        padded[: len(chunk)] = chunk
        padded[len(chunk) : 4 * count] = 0
        words = padded.view(torch.int32)[:count]
        sums.append(torch.mul(keys[:, :count], words, out=products[:, :count]).sum(1))
    content = torch.cat(sums).cpu().numpy().tobytes() if sums else b""
    found = hashlib.blake2b(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + content, digest_size=16)
    return struct.unpack("4i", found.digest())


@functools.lru_cache(1)
def _keys(device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(0x5EED)
    bounds = torch.iinfo(torch.int64)
    return torch.randint(bounds.min, bounds.max, (2, _CHUNK_BYTES // 4), generator=generator).to(device)
