"""hsdp without capture: torch's FSDP2 (`fully_shard`) under MindSpore's rule and words.

Which parameters are cut is decided as for captured networks (`parameters/hsdp.py`). shard_size below the ranks
is FSDP2's two-dimensional mesh (HSDP). A parameter that is left whole is cut over a mesh of (ranks, 1), so that FSDP2
reduces its gradient (its `ignored_params` get none). level3 is `reshard_after_forward=True`; level1 keeps whole
gradients while `no_sync()` adds them up, level2 and level3 reduce them in every backward pass.

FSDP2 would put new parameter objects into the modules. Here they show the user's own, which share its memory, as parts
(`parts/part.py`). It neither looks at the modules nor calls hooks of tensors afterwards: what it would miss is refused
at the next call.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState  # a test looks after these names
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

from msrun.errors import ParallelError, StrategyError
from msrun.runtime import world
from msrun.runtime.capture.captured_graph import Target
from msrun.runtime.execute.gradients import mean_over_ranks
from msrun.runtime.execute.placement import Placement, chunk_bounds
from msrun.runtime.nn.with_loss import user_name
from msrun.runtime.parallel.border import leaves_of, map_tensors, share_leaves
from msrun.runtime.parallel.modes.own_gradients import has_own_gradient
from msrun.runtime.parallel.parameters.hsdp import HsdpSpec, choose_shard_axes
from msrun.runtime.parallel.parameters.storage import digest
from msrun.runtime.parts.part import Part, ShardedParameter, become_part, exchange_state
from msrun.runtime.sharding.layout import Mesh, TensorLayout, build_mesh
from msrun.runtime.tensors.plain_tensors import local_part, put_value

try:  # a private place: tests fail loudly when it moves
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, ShardPlacementResult
except ImportError:  # torch before 2.12 shards all parameters of a module alike
    HSDPMeshInfo = ShardPlacementResult = None  # type: ignore[assignment,misc]
_CALLS_THAT_LOOK = 2
"""How many calls of a block are looked at for values that change without a new version."""
LEAVES_WHOLE = ShardPlacementResult is not None
"""Whether single parameters of a module can stay whole."""


class ShardedNetwork:
    """A network under FSDP2. All ranks make it together.

    Args:
        sums_wide: gradients of 16 bits are added up in float32.
    """

    def __init__(self, target: Target, spec: HsdpSpec, *, sums_wide: bool) -> None:
        self._spec = spec
        is_short = any(p.dtype in (torch.float16, torch.bfloat16) for p in target.root.parameters())
        self._policy = MixedPrecisionPolicy(reduce_dtype=torch.float32 if is_short and sums_wide else None)
        ranks = world.get_group_size()
        spec.check_world(ranks)
        mesh = build_mesh(ranks)
        root = target.root
        self._ignored = {parameter for parameter in root.parameters() if has_own_gradient(parameter)}
        own = set(map(id, self._ignored))
        numbers = {p for p in root.parameters() if not p.dim() and id(p) not in own}  # which FSDP2 does not take
        self._ignored |= numbers
        for number in numbers:
            if number.requires_grad:
                number.register_hook(mean_over_ranks)
        self.decisions = {id(p): _decide(n, p, spec, mesh) for n, p in root.named_parameters() if id(p) not in own}
        self._slots: dict[tuple[int, str], Any] = {}
        """(id of a module, name of a parameter in it) -> FSDP2's record of the parameter"""
        self._is_looked = False
        self._roots = [self._shard(module, ranks) for module in called_modules(target)]

    def _shard(self, root: nn.Module, ranks: int) -> FSDPModule:
        owners = [(module, name, old) for module in root.modules() for name, old in module._parameters.items()]
        for module, name, old in owners:
            if isinstance(module, FSDPModule) or isinstance(old, Part | DTensor):
                owner = type(module).__name__.removeprefix("FSDP")
                raise StrategyError(
                    f"{owner}.{name} is a part of another network, too, that FSDP2 has cut: put both "
                    'networks into one module, or use parallel_mode="semi_auto" with hsdp'
                )
        before = dict(self.decisions)
        size = self._spec.shard_size
        device = world.device().type
        is_flat = size == -1 or size >= ranks or not any(d.shard_axes for d in before.values())
        mesh = _mesh(device, (ranks,)) if is_flat else _mesh(device, (ranks // size, size))
        leaves_whole = any(decision.shape and not decision.shard_axes for decision in before.values())
        if leaves_whole and not LEAVES_WHOLE:
            raise StrategyError(
                f"hsdp(threshold={self._spec.threshold}) leaves parameters whole, for which "
                f'parallel_mode="data_parallel" needs torch 2.12 and this is {torch.__version__}: install it, or use '
                'parallel_mode="semi_auto"'
            )

        whole = None
        if leaves_whole:
            whole = HSDPMeshInfo(_mesh(device, (ranks, 1)), shard_mesh_dim=1, replicate_mesh_dim=0)

        def place(parameter: nn.Parameter) -> ShardPlacementResult | None:
            if whole is None or before[id(parameter)].shard_axes:
                return None
            return ShardPlacementResult(None, whole)

        _make_contiguous(root)
        frees = self._spec.optimizer_level == "level3"
        blocks = [*_blocks(root, before), root]
        self._check_types(blocks)
        for module in blocks:
            fully_shard(
                module,
                mesh=mesh,
                reshard_after_forward=frees,
                shard_placement_fn=place,
                mp_policy=self._policy,
                ignored_params=self._ignored,
            )
        assert isinstance(root, FSDPModule)
        self._watch(root, {(id(module), name): old for module, name, old in owners})
        exchange_state(root)
        for module in root.modules():
            vars(module)["__deepcopy__"] = refuse_copy
            vars(module)["_apply"] = partial(_apply, module)
        return root

    def _watch(self, root: nn.Module, owners: Mapping[tuple[int, str], Any]) -> None:
        """Look at what calls do to parameters, and give the user's objects what FSDP2 has made of them.

        Args:
            owners: (id of a module, name of a parameter in it) -> the parameter.
        """
        for module in root.modules():
            records = _records(module) if isinstance(module, FSDPModule) else []
            for record in records:
                info = record._module_info
                owning, names = [info.module, *info.shared_modules], [info.param_name, *info.shared_param_names]
                slots = [(id(owner), name) for owner, name in zip(owning, names, strict=True)]
                self._slots |= dict.fromkeys(slots, record)
                _take_over(record, owners[slots[0]], self.decisions[id(owners[slots[0]])])
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(lambda _module, _args, records=records: _show(records))
                _refuse_writes_in_forward(module)
                _give_results_memory(module)

    def show_own(self) -> None:
        """Let the modules show the user's parameters between the passes, at level1 and level2, too."""
        for record in self._slots.values():
            record._setattr_on_modules(record.sharded_param)

    def show_gathered(self) -> None:
        """Let them show gathered parameters in a backward pass, for what it runs again."""
        _show(self._slots.values())

    def _check_types(self, blocks: Sequence[nn.Module]) -> None:
        """Refuse blocks with parameters of several types, which FSDP2 does not take."""
        seen = set(map(id, self._ignored))
        for block in blocks:
            named = [(n, p) for n, p in block.named_parameters() if p.requires_grad and id(p) not in seen]
            seen.update(id(parameter) for _, parameter in named)
            other = next(((name, p) for name, p in named if p.dtype != named[0][1].dtype), None)
            if other is not None:
                raise StrategyError(
                    f"{named[0][0]} is {named[0][1].dtype} and {other[0]} {other[1].dtype}, and FSDP2 sends what is "
                    f"trained in {type(block).__name__} as one type: convert them to one, put them into different "
                    'members of an nn.Sequential or nn.ModuleList, or use parallel_mode="semi_auto" with hsdp'
                )

    def check(self) -> None:
        """Look at the network again before a call."""
        for module in (module for root in self._roots for module in root.modules()):  # type: ignore[attr-defined]
            for name, parameter in module._parameters.items():
                if parameter is None or parameter in self._ignored:
                    continue
                record = self._slots.get((id(module), name))
                if record is None or all(parameter is not one for one in (record.own, _gathered(record))):
                    raise StrategyError(
                        f"{type(module).__name__}.{name} was put into the network after FSDP2 had cut it, which would "
                        "not reduce its gradient: change the network before AutoParallel's first call, or make a new "
                        'network and AutoParallel, or use parallel_mode="semi_auto"'
                    )
                known_dtype = record.sharded_param.dtype
                if parameter.dtype != known_dtype:
                    raise StrategyError(
                        f"{type(module).__name__}.{name} was made {parameter.dtype} after FSDP2 had cut it as "
                        f"{known_dtype}: convert the network before AutoParallel's first call"
                    )
                if parameter._backward_hooks:
                    raise StrategyError(
                        f"{type(module).__name__}.{name} has a hook (register_hook), which FSDP2 never calls: use "
                        'register_post_accumulate_grad_hook, or parallel_mode="semi_auto"'
                    )
                record.sharded_param.requires_grad_(parameter.requires_grad)

    def look(self, results: Sequence[Tensor]) -> None:
        """Look at the first results for tensors that are trained and that no module has registered."""
        if not self._is_looked:
            self._is_looked = True
            own = {id(_gathered(record)) for record in self._slots.values()} | set(map(id, self._ignored))
            share_leaves([leaf for leaf in leaves_of(results) if id(leaf) not in own])

    def reshard(self) -> None:
        """Free what a forward pass without backward has gathered."""
        for root in self._roots:
            for module in root.modules():  # type: ignore[attr-defined]
                if isinstance(module, FSDPModule):
                    module.reshard()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """level1: keep whole gradients on every rank for as long as the context lasts."""
        self.set_sync(reduces=False)
        try:
            yield
        finally:
            self.set_sync(reduces=True)

    def set_sync(self, *, reduces: bool) -> None:
        """Say whether the next backward passes reduce gradients; level2 and level3 always do."""
        for root in self._roots if self._spec.optimizer_level == "level1" else []:
            root.set_requires_gradient_sync(reduces)


def _make_contiguous(root: nn.Module) -> None:
    """Lay parameters out as FSDP2 takes them; refuse those that share memory with others."""
    places = Counter(p.untyped_storage().data_ptr() for p in root.parameters() if not isinstance(p, DTensor))
    for name, parameter in root.named_parameters():
        if isinstance(parameter, DTensor) or parameter.is_contiguous():
            continue
        if places[parameter.untyped_storage().data_ptr()] > 1:
            raise StrategyError(
                f"{name} shares its memory with another parameter in another order, which FSDP2 would cut apart: "
                'make one of them from the other in forward, or use parallel_mode="semi_auto" with hsdp'
            )
        parameter.data = parameter.data.contiguous()  # FSDP2 takes no other


def _refuse_writes_in_forward(block: nn.Module) -> None:
    """Let a call refuse what it writes into a parameter: into the gathered one, which FSDP2 frees again."""
    inside = [module for module in block.modules() if isinstance(module, FSDPModule) and module is not block]
    inner = {id(module) for other in inside for module in other.modules()}
    owners = [(path, module) for path, module in block.named_modules() if id(module) not in inner]
    found: list[tuple[str, nn.Parameter, Any]] = []
    calls = itertools.count()

    def state_of(value: nn.Parameter, number: int) -> Any:
        # `.data` counts no version: the first calls look at every value
        looks = number < _CALLS_THAT_LOOK and not isinstance(value, DTensor | FakeTensor)
        return value._version, digest(value) if looks else None

    def note(_module: nn.Module, _args: Any) -> None:
        number = next(calls)
        found[:] = [
            (f"{path}.{name}".lstrip("."), value, state_of(value, number))
            for path, module in owners
            for name, value in module._parameters.items()
            if value is not None
        ]

    def compare(_module: nn.Module, _args: Any, _result: Any) -> None:
        written = [name for name, value, (version, values) in found if value._version != version]
        written += [name for name, value, (_, values) in found if values is not None and digest(value) != values]
        found.clear()
        if written:
            raise StrategyError(
                f"the forward pass of {type(block).__name__.removeprefix('FSDP')} writes into its parameter "
                f"{written[0]}, which FSDP2 gathers for the call and frees again with what was written: write it "
                "between the steps, make it a buffer, or leave hsdp out"
            )

    block.register_forward_pre_hook(note)
    block.register_forward_hook(compare, prepend=True)


def _give_results_memory(block: nn.Module) -> None:
    """Let no result of a block be a view: a write into one drops the hook by which FSDP2 gathers for the backward pass.

    torch crashes where it puts that hook on a view whose memory was written through another one, and where somebody
    reads a weight among the results that FSDP2 has freed.
    """

    def own(result: Tensor) -> Tensor:
        is_view = result.requires_grad and result._is_view()
        return result.clone() if is_view or (result.grad_fn is None and is_gathered(result)) else result

    def is_gathered(result: Tensor) -> bool:
        memory = result.untyped_storage()._cdata
        shown = (parameter for parameter in block.parameters() if not isinstance(parameter, Part))
        return any(memory == parameter.untyped_storage()._cdata for parameter in shown)

    block.register_forward_hook(lambda _module, _args, result: map_tensors(own, result), prepend=True)


def _take_over(record: Any, own: Any, placement: Placement) -> None:
    """Let a user's parameter share the memory of what FSDP2 has put in its place, and be what the modules show."""
    meant, show = record.sharded_param, record._setattr_on_modules
    put_value(own, meant.to_local().detach(), _refuse_stale)
    become_part(own, placement, ShardedParameter)
    record.own, own.record = own, record

    def call_hooks(_: Tensor) -> None:
        for hook in (own._post_accumulate_grad_hooks or {}).values():
            hook(own)

    meant._post_accumulate_grad_hooks = OrderedDict({0: call_hooks})
    record._setattr_on_modules = lambda shown: show(own if shown is meant else shown)
    record.reset_sharded_param = lambda: None  # it would take the user's parameter for another one
    show(own)


def _refuse_stale(gradient: Tensor) -> Tensor:
    """Stand in for the gradient of a whole parameter that FSDP2 has cut since."""
    raise ParallelError(
        f"a parameter of shape {tuple(gradient.shape)} is still held by a backward graph from before AutoParallel's "
        "first call, when FSDP2 has cut it: compute losses from parameters after that call"
    )


def _gathered(record: Any) -> nn.Parameter | None:
    """Return what stands for a parameter in calls; None before the first one."""
    return getattr(record, "_unsharded_param", None)


def _show(records: Iterable[Any]) -> None:
    """Let the modules show what is gathered of these parameters."""
    for record in records:
        if record.sharded_state is ShardedState.UNSHARDED:
            record._setattr_on_modules(record._unsharded_param)


def refuse_copy(_: dict[int, Any]) -> Any:
    """Stand in for the `__deepcopy__` of a module under FSDP2."""
    raise StrategyError(
        "copy.deepcopy: FSDP2 has cut this network, whose copy it could not run: load its state_dict(), called on all "
        'ranks, into a network of its own, or use parallel_mode="semi_auto" with hsdp, whose copies are cut too'
    )


def _records(module: FSDPModule) -> list[Any]:
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # the second: torch before 2.13
    return [record for group in groups if group is not None for record in group.fsdp_params]


def _apply(module: nn.Module, function: Any, *args: Any, **kwargs: Any) -> nn.Module:
    """Stand in for the `_apply` of a module under FSDP2, which `to()` and `float()` call."""
    held: Any = module._parameters
    for name, parameter in held.items():
        if isinstance(parameter, Part) and (new := function(parameter)).dtype != parameter.dtype:
            raise StrategyError(
                f"{type(module).__name__}.{name} would become {new.dtype} after FSDP2 has cut it as {parameter.dtype}: "
                "convert the network before AutoParallel's first call"
            )
    converted: nn.Module = type(module)._apply(module, function, *args, **kwargs)
    return converted


@contextlib.contextmanager
def unsharded(root: nn.Module) -> Iterator[None]:
    """Let a network under FSDP2 run without it for as long as the context lasts, with the parameters that it shows."""
    hooks = [h for module in root.modules() for h in (module._forward_pre_hooks, module._forward_hooks)]
    before = [dict(of_module) for of_module in hooks]
    try:
        for of_module in hooks:
            for key in [k for k, hook in of_module.items() if isinstance(getattr(hook, "__self__", None), FSDPState)]:
                del of_module[key]
        yield
    finally:
        for of_module, all_of_them in zip(hooks, before, strict=True):
            of_module.clear()
            of_module.update(all_of_them)


def called_modules(target: Target) -> list[nn.Module]:
    """Return the modules that a call runs: the network, or those that a function closes over."""
    root = target.root
    is_container = not isinstance(target.call, nn.Module) and type(root) is nn.Module
    return list(root.children()) if is_container else [root]


def _mesh(device: str, shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def _decide(name: str, parameter: nn.Parameter, spec: HsdpSpec, mesh: Mesh) -> Placement:
    shape, used = tuple(parameter.shape), TensorLayout.replicated(parameter.dim())
    axes, reason = choose_shard_axes(
        spec,
        mesh,
        used,
        shape,
        parameter.element_size(),
        opted_out=getattr(parameter, "parallel_optimizer", True) is False,
        partial_axes=mesh.axes,
    )
    parts = mesh.extent(axes)
    bounds = chunk_bounds(shape[0], parts) if axes and shape[0] % parts else ()
    rank, ranks = world.get_rank(), world.get_group_size()
    return Placement(user_name(name), shape, used, axes, reason, mesh, rank, ranks, bounds=bounds)


def _blocks(root: nn.Module, decisions: dict[int, Placement]) -> list[nn.Module]:
    """Return the modules that travel on their own: outermost members of lists and sequences that hold cut parameters.

    A parameter that two of them share, or one of them and the rest, travels with the root.
    """
    found: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            if isinstance(module, nn.Sequential | nn.ModuleList):
                found.append(child)
            else:
                search(child)

    search(root)
    holders: dict[int, set[int]] = {}
    for module in root.modules():
        block = next((i for i, b in enumerate(found) if any(module is inner for inner in b.modules())), -1)
        for parameter in module._parameters.values():
            holders.setdefault(id(parameter), set()).add(block)
    return [
        block
        for block in dict.fromkeys(found)
        if any(id(p) in decisions and decisions[id(p)].shard_axes for p in block.parameters())
        and all(len(holders[id(p)]) == 1 for p in block.parameters())
    ]


def local_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Return the shape of this rank's part."""
    return tuple(local_part(parameter).shape)
