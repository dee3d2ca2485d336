"""Cell: MindSpore's module, a torch module whose `construct` is its `forward`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

from msrun import runtime
from msrun.errors import UsageError
from msrun.mindspore.ops.table import note_once
from msrun.runtime.parallel.placed_cells import place


class _BeginsInPrediction(type):
    """Cells begin in the mode of prediction, as MindSpore's: `set_train()` changes it, as Model does."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:
        cell = super().__call__(*args, **settings)
        cell.training = False
        return cell

    @property
    def __signature__(cls) -> inspect.Signature:  # else `help(nn.Dense)` would show the one above
        if hasattr(cls, "arguments"):
            return inspect.signature(cls.arguments)
        own = inspect.signature(cls.__init__)  # type: ignore[misc]
        return own.replace(parameters=list(own.parameters.values())[1:])


def _noted(name: str) -> Any:
    def method(self: Any, *_: Any, **__: Any) -> Any:
        """Return the cell: a graph is captured from the first inputs, so that MindSpore's compiler needs no words."""
        note_once(f"Cell.{name}")
        return self

    method.__name__ = name
    return method


class Cell(nn.Module, metaclass=_BeginsInPrediction):
    """A torch module with MindSpore's names: write `construct` in place of `forward`."""

    _auto_prefix = True
    mindspores_names: Mapping[str, str] = {}
    """torch's name of a parameter or buffer of this cell -> MindSpore's, such as weight -> gamma."""

    def __init__(self, auto_prefix: bool = True, flags: Mapping[str, Any] | None = None) -> None:
        vars(self)["_auto_prefix"] = auto_prefix
        super().__init__()
        if flags:
            self.add_flags(**flags)

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "construct" in vars(cls):
            cls.forward = vars(cls)["construct"]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module) and self._auto_prefix:
            _name_parameters(value, f"{name}.")

    def __getattr__(self, name: str) -> Any:
        for own, theirs in type(self).mindspores_names.items():
            if name == theirs:
                return getattr(self, own)
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Add a parameter; one without a name gets that of the attribute."""
        super().register_parameter(name, param)
        if param is not None:
            vars(param).setdefault("param_name", type(self).mindspores_names.get(name, name))

    def extend_repr(self) -> str:
        """Return what `print(cell)` shows in its brackets."""
        return ""

    # -- parameters ---------------------------------------------------------------------------------------------

    def get_parameters(self, expand: bool = True) -> Iterator[nn.Parameter]:
        """Yield the parameters; without `expand` those of this cell alone."""
        return self.parameters(recurse=expand)

    def trainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        """Return the parameters that are trained."""
        return [parameter for parameter in self.parameters(recurse) if parameter.requires_grad]

    def untrainable_params(self, recurse: bool = True) -> list[nn.Parameter]:
        """Return the parameters that are not trained."""
        return [parameter for parameter in self.parameters(recurse) if not parameter.requires_grad]

    def parameters_and_names(self, name_prefix: str = "", expand: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter)."""
        return self.named_parameters(name_prefix, expand)

    def parameters_dict(self, recurse: bool = True) -> dict[str, nn.Parameter]:
        """Return name -> parameter."""
        return dict(self.named_parameters(recurse=recurse))

    def insert_param_to_cell(self, param_name: str, param: nn.Parameter, check_name_contain_dot: bool = True) -> None:
        """Add a parameter under a name."""
        self.register_parameter(param_name, param)

    def update_parameters_name(self, prefix: str = "", recurse: bool = True) -> None:
        """Put a prefix before the names of the parameters."""
        _name_parameters(self, prefix, recurse)

    def init_parameters_data(self, auto_parallel_mode: bool = False) -> dict[nn.Parameter, nn.Parameter]:
        """Return each parameter as its own replacement: they have their values from the start."""
        return {parameter: parameter for parameter in self.parameters()}

    requires_grad = property(
        lambda self: all(parameter.requires_grad for parameter in self.parameters()),
        lambda self, value: self.requires_grad_(value),
    )
    """Whether all parameters are trained; setting it says so for all of them."""

    # -- cells --------------------------------------------------------------------------------------------------

    cells = nn.Module.children
    get_sub_cell = nn.Module.get_submodule

    def cells_and_names(self, cells: Any = None, name_prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield (path, cell) of this cell and all below."""
        return self.named_modules(prefix=name_prefix)

    def insert_child_to_cell(self, child_name: str, child_cell: nn.Module) -> None:
        """Add a cell under a name."""
        self.add_module(child_name, child_cell)
        _name_parameters(child_cell, f"{child_name}.")

    def name_cells(self) -> dict[str, nn.Module]:
        """Return name -> cell of the cells directly below."""
        return dict(self.named_children())

    cls_name = property(lambda self: type(self).__name__)
    """Name of the class."""
    phase = property(lambda self: "train" if self.training else "predict")

    # -- modes --------------------------------------------------------------------------------------------------

    def set_train(self, mode: bool = True) -> Self:
        """Set the training mode of this cell and all below."""
        return self.train(mode)

    def set_grad(self, requires_grad: bool = True) -> Self:
        """Return the cell: whether gradients are computed is up to who calls it, as in torch."""
        return self

    def add_flags(self, **flags: Any) -> Self:
        """Keep flags on the cell, as attributes and for `get_flags`; `fp16=True` is `to_float(float16)`."""
        vars(self).setdefault("_flags", {}).update(flags)
        for name, value in flags.items():
            vars(self).setdefault(name, value)
        if flags.get("fp16") or flags.get("fp32"):
            self.to_float(torch.float16 if flags.get("fp16") else torch.float32)
        return self

    def add_flags_recursive(self, **flags: Any) -> Self:
        """Keep flags on the cell and all below."""
        for cell in self.modules():
            if isinstance(cell, Cell) and cell is not self:
                vars(cell).setdefault("_flags", {}).update(flags)
        return self.add_flags(**flags)

    def get_flags(self) -> dict[str, Any]:
        """Return the flags that were added."""
        return dict(vars(self).get("_flags", {}))

    def to_float(self, dst_type: torch.dtype) -> Self:
        """Compute the cell, and all below, in a type: inputs and parameters are cast at each call. Returns the cell.

        Raises:
            UsageError: another type than float16, bfloat16 and float32.
        """
        if dst_type not in (torch.float16, torch.bfloat16, torch.float32):
            raise UsageError(f"{self.cls_name}.to_float({dst_type!r}): float16, bfloat16 or float32")
        if "_compute_type" not in vars(self):
            vars(self)["forward"] = functools.partial(_compute_in_type, self, type(self).forward)
        vars(self)["_compute_type"] = dst_type
        return self

    set_inputs, compile, set_jit_config, set_boost, set_broadcast_flag = (
        _noted(name) for name in ("set_inputs", "compile", "set_jit_config", "set_boost", "set_broadcast_flag")
    )

    def set_comm_fusion(self, fusion_type: int, recurse: bool = True) -> Self:
        """Let the parameters travel with those of the same number; see `msrun.runtime.set_comm_fusion`."""
        runtime.set_comm_fusion(self, fusion_type, recurse)
        return self

    def place(self, role: str, rank_id: int) -> None:
        """Let the process with this rank compute the cell, for all; see `msrun.runtime.parallel.placed_cells`."""
        place(self, type(self).forward, role, rank_id)

    set_param_ps, recompute, shard = runtime.set_param_ps, runtime.recompute, runtime.shard


def _name_parameters(module: nn.Module, prefix: str, recurse: bool = True) -> None:
    """Name parameters by their place, as MindSpore does whenever a cell is put into another."""
    for path, cell in module.named_modules() if recurse else [("", module)]:
        theirs = cell.mindspores_names if isinstance(cell, Cell) else {}
        for name, parameter in cell.named_parameters(recurse=False):
            vars(parameter)["param_name"] = f"{prefix}{path}{'.' * bool(path)}{theirs.get(name, name)}"


def _compute_in_type(cell: Cell, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a cell with parameters and inputs of its type of computation."""
    dtype = vars(cell)["_compute_type"]

    def cast(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    args, kwargs = pytree.tree_map(cast, (args, kwargs))
    others = {name: cast(value) for name, value in cell.named_parameters() if cast(value) is not value}
    with _reparametrize_module(cell, others):
        return forward(cell, *args, **kwargs)


class SequentialCell(Cell, nn.Sequential):
    """Cells one after the other: given one by one, as a list, or as an ordered dict."""

    def __init__(self, *cells: Any) -> None:
        nn.Module.__init__(self)
        if len(cells) == 1 and isinstance(cells[0], list | tuple | nn.ModuleList):
            cells = tuple(cells[0])
        named = cells[0].items() if len(cells) == 1 and isinstance(cells[0], Mapping) else enumerate(cells)
        for name, cell in named:
            self.insert_child_to_cell(str(name), cell)

    def append(self, cell: nn.Module) -> Self:
        """Add a cell at the end."""
        self.insert_child_to_cell(str(len(self)), cell)
        return self


class CellList(Cell, nn.ModuleList):
    """A list of cells."""

    def __init__(self, *cells: Any, **settings: Any) -> None:
        nn.ModuleList.__init__(self, cells[0] if len(cells) == 1 and isinstance(cells[0], list | tuple) else cells)
        _name_parameters(self, "")


class CellDict(Cell, nn.ModuleDict):
    """Cells by name."""

    def __init__(self, *cells: Any) -> None:
        nn.ModuleDict.__init__(self, *cells)
        _name_parameters(self, "")


class GraphCell(Cell):
    """A program of MindSpore's compiler, which is not read here."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise UsageError("GraphCell: MindIR is not read here; load the weights with load_checkpoint into the network")
