"""Cell: MindSpore's module, a torch module whose `construct` is its `forward`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from torch import nn

from msrun.runtime import recompute, set_comm_fusion, set_param_ps, shard


class Cell(nn.Module):
    """A torch module with MindSpore's names: write `construct` in place of `forward`."""

    def __init__(self, auto_prefix: bool = True, flags: Mapping[str, Any] | None = None) -> None:
        del auto_prefix, flags  # names are torch's: the path of the attribute
        super().__init__()

    def __init_subclass__(cls, **settings: Any) -> None:
        super().__init_subclass__(**settings)
        if "construct" in vars(cls):
            cls.forward = vars(cls)["construct"]

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

    # -- cells --------------------------------------------------------------------------------------------------

    def cells(self) -> Iterator[nn.Module]:
        """Yield the cells directly below."""
        return self.children()

    def cells_and_names(self, cells: Any = None, name_prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield (path, cell) of this cell and all below."""
        del cells
        return self.named_modules(prefix=name_prefix)

    def insert_child_to_cell(self, child_name: str, child_cell: nn.Module) -> None:
        """Add a cell under a name."""
        self.add_module(child_name, child_cell)

    # -- modes --------------------------------------------------------------------------------------------------

    def set_train(self, mode: bool = True) -> Self:
        """Set the training mode of this cell and all below."""
        return self.train(mode)

    def set_grad(self, requires_grad: bool = True) -> Self:
        """Return the cell: whether gradients are computed is up to who calls it, as in torch."""
        del requires_grad
        return self

    def set_comm_fusion(self, fusion_type: int, recurse: bool = True) -> Self:
        """Let the parameters travel with those of the same number; see `msrun.runtime.set_comm_fusion`."""
        set_comm_fusion(self, fusion_type, recurse)
        return self

    def set_param_ps(self, recurse: bool = True, init_in_server: bool = False) -> None:
        """Let the parameters live on parameter servers; see `msrun.runtime.set_param_ps`."""
        set_param_ps(self, recurse, init_in_server)

    def recompute(self, **settings: Any) -> None:
        """Compute the cell again in the backward pass; see `msrun.runtime.recompute`."""
        recompute(self, **settings)

    def shard(
        self,
        in_strategy: Sequence[Any] | None = None,
        out_strategy: Sequence[Any] | None = None,
        parameter_plan: Mapping[str, Any] | None = None,
    ) -> Self:
        """Cut the cell over ranks; see `msrun.runtime.shard`."""
        shard(self, in_strategy, out_strategy, parameter_plan)
        return self


class SequentialCell(Cell, nn.Sequential):
    """Cells one after the other: given one by one, as a list, or as an ordered dict."""

    def __init__(self, *cells: Any) -> None:
        nn.Module.__init__(self)
        if len(cells) == 1 and isinstance(cells[0], list | tuple | nn.ModuleList):
            cells = tuple(cells[0])
        named = cells[0].items() if len(cells) == 1 and isinstance(cells[0], Mapping) else enumerate(cells)
        for name, cell in named:
            self.add_module(str(name), cell)


class CellList(Cell, nn.ModuleList):
    """A list of cells."""

    def __init__(self, *cells: Any) -> None:
        nn.ModuleList.__init__(self, cells[0] if len(cells) == 1 and isinstance(cells[0], list | tuple) else cells)
