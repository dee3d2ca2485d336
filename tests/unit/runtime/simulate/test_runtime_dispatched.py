"""What an operator does, whether it returns its result or writes into what it was given."""

from __future__ import annotations

import torch
import torch.distributed.fsdp  # its operators
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from msrun.runtime.cost.operators import NOTHING, Work
from msrun.runtime.simulate.recording import work_of


class Works(TorchDispatchMode):
    """Keeps what each operator does."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Work] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.found.append(work_of(func, args, kwargs, result, made))
        return result


def test_operators_that_write_into_their_arguments_move_bytes_too() -> None:
    """FSDP2 copies whatever it gathers and reduces by operators that return nothing."""
    whole, parts = torch.ones(8, 4), [torch.ones(8, 1), torch.ones(8, 3)]
    with Works() as works:
        torch._foreach_copy_([whole], [torch.zeros_like(whole)])
        torch.ops.fsdp.split_with_sizes_copy(whole, [1, 3], 1, out=parts)
        torch.ops.fsdp.chunk_cat([whole], dim=0, num_chunks=2, out=torch.empty(2, 16))
    works.found = [work for work in works.found if work != NOTHING]
    written = [work.written_bytes for work in works.found if work.read_bytes > whole.nbytes]
    assert written == [whole.nbytes] * 3


def test_views_and_memory_without_values_do_nothing() -> None:
    with Works() as works:
        torch.empty(4).view(2, 2)
    assert works.found == [NOTHING, NOTHING]
