"""Part: what one rank may do with its part of a tensor without asking the others."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils import dlpack

from msrun.errors import ParallelError
from msrun.runtime.execute.placement import Placement, is_held, placement_of
from msrun.runtime.parts.part import Part, PartParameter, become_part
from msrun.runtime.parts.part_functions import as_part
from msrun.runtime.sharding.layout import Mesh, TensorLayout
from msrun.runtime.tensors.plain_tensors import plain


def placement(name="fc.weight", *, rank=1, dim=0, **changes):
    """Return that of a 4 x 6 tensor, one of its dimensions cut over two ranks."""
    layout = TensorLayout(((0,), ()) if dim == 0 else ((), (0,)))
    return Placement(name, (4, 6), layout, (), "test", Mesh((2,)), rank, 2, **changes)


def parameter(rank=1):
    made = nn.Parameter(torch.arange(12.0).view(2, 6))
    become_part(made, placement(rank=rank))
    return made


@pytest.mark.parametrize(
    ("rows", "bounds", "is_even"),
    [(4, (), True), (4, (0, 2, 4), True), (5, (0, 3, 5), True), (5, (0, 2, 5), False), (4, (0, 3, 4), False)],
)
def test_even_parts_are_those_that_torch_makes(rows, bounds, is_even):
    layout = TensorLayout(((0,), ()))
    placed = Placement("w", (rows, 6), layout, (), "test", Mesh((2,)), 0, 2, bounds=bounds)
    assert placed.is_even is is_even
    if bounds:
        torchs = [len(part) for part in torch.zeros(rows, 6).chunk(2)]
        assert is_even is (torchs == [bounds[1], rows - bounds[1]])


def test_parameter_becomes_a_part_and_stays_the_object_that_it_is():
    class Mine(nn.Parameter):
        """A parameter of the user's own class."""

    for kind in (nn.Parameter, Mine):
        made = kind(torch.zeros(2, 6))
        before = id(made)
        become_part(made, placement())
        assert id(made) == before
        assert isinstance(made, PartParameter)
        assert isinstance(made, kind)
        assert made.shape == made.size() == (4, 6)
        assert (made.size(0), len(made), made.stride(), made.nbytes) == (4, 4, (6, 1), 96)
        assert made.numel() == torch.numel(made) == made.nelement() == 24
        assert placement_of(made) is not None


def test_results_element_by_element_are_parts():
    part = parameter()
    for result in (
        part + 1,
        1 - part,
        part.detach(),
        part.data,
        part.clone(),
        part.to(torch.float64),
        torch.zeros_like(part),
        part.new_zeros(part.shape),
        part.pow(2).sqrt().clamp(0, 3),
        torch.where(part > 3, part, 0),
        torch._foreach_mul([part], 2.0)[0],
        copy.deepcopy(part),
    ):
        assert isinstance(result, Part), type(result)
        assert result.placement == part.placement
    assert type(part.to_local()) is torch.Tensor
    assert part.to_local().data_ptr() == plain(part).data_ptr()


def test_operands_are_whole_or_this_ranks_part():
    whole = torch.arange(24.0).view(4, 6)
    for rank in (0, 1):
        part, rows = parameter(rank).detach(), slice(2 * rank, 2 * rank + 2)
        for operand in (whole, whole[:1], whole[0], whole[:, :1], torch.tensor(2.0)):
            expected = part.to_local() * operand.expand(4, 6)[rows]
            assert torch.equal((part * operand).to_local(), expected)
        assert torch.equal((part * whole[rows]).to_local(), (part * whole).to_local())


def test_one_row_that_could_be_the_part_or_a_row_of_the_whole_is_refused():
    placed = Placement("bias", (2, 6), TensorLayout(((0,), ())), (), "test", Mesh((2,)), 0, 2)
    part = as_part(torch.ones(1, 6), placed)
    with pytest.raises(ParallelError, match="bias: this rank holds"):
        part * torch.ones(1, 6)
    assert torch.equal((part * torch.ones(2, 6)).to_local(), torch.ones(1, 6))


def test_ordinary_state_becomes_a_part_when_a_part_is_added_to_it():
    state = torch.zeros(2, 6)
    state.mul_(0.9).add_(parameter().detach())
    assert isinstance(state, Part)
    states = [torch.zeros(2, 6), torch.zeros(3)]
    torch._foreach_add_(states, [parameter().detach(), torch.ones(3)])
    assert isinstance(states[0], Part)
    assert type(states[1]) is torch.Tensor


def test_gradients_that_autograd_returns_are_parts_and_zeros_where_the_loss_leaves_one_out():
    part, other = parameter(), parameter()
    between, ones = part * 2, torch.ones(2, 6)

    def gradients(inputs, **settings):
        return torch.autograd.grad(between * 3, inputs, ones, retain_graph=True, **settings)

    found = [*gradients(iter([part, between, other]), materialize_grads=True), *gradients({"a": part}).values()]
    assert all(isinstance(value, Part) for value in found)
    assert [value.to_local().unique().tolist() for value in found] == [[6.0], [3.0], [0.0], [6.0]]
    assert gradients([part, other], allow_unused=True)[1] is None
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        gradients([part, other])
    with pytest.raises(ValueError, match="allow_unused"):
        gradients([part], allow_unused=False, materialize_grads=True)
    torch.autograd.backward(between, ones, inputs=[part])
    assert part.grad.to_local().unique().tolist() == [2.0]
    assert part.grad is part.grad
    del part.grad
    assert part.grad is None


def test_gradient_of_rows_says_of_itself_what_this_rank_has():
    part = parameter()
    part.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 6), 2.0), (2, 6)).coalesce()
    rows = part.grad
    assert (rows.shape, rows.size(0), len(rows), rows.numel()) == ((2, 6), 2, 2, 12)
    optimizer = torch.optim.Adagrad([part], lr=1.0)
    optimizer.step(lambda: 0.0)  # a step with a closure asks Part about every operation
    assert part.to_local().tolist() == [[0, 1, 2, 3, 4, 5], [5, 6, 7, 8, 9, 10]]


def test_parts_do_not_leave_the_process_nor_hand_out_memory():
    part = parameter().detach()
    said = r"fc.weight: this rank holds \(2, 6\) of \(4, 6\)"
    for use in (part.data_ptr, part.untyped_storage, lambda: part.resize_(2), lambda: dlpack.to_dlpack(part)):
        with pytest.raises(ParallelError, match=f"{said}.*whole_parameters"):
            use()
    for value in (parameter(), part, [parameter()]):
        with pytest.raises(ParallelError, match=f"{said}.*save_checkpoint"):
            torch.save(value, io.BytesIO())
    assert "fc.weight: this rank holds (2, 6) of (4, 6)" in f"{parameter()}"


def test_elements_and_copies_of_other_stages_count_and_are_named():
    made = nn.Parameter(torch.empty(0, 6))
    become_part(made, placement(stages=(1,), holders=(1,), is_held=False))
    assert (made.numel(), made.dim()) == (24, 2)
    assert torch.equal((made * torch.ones(4, 6)).to_local(), torch.empty(0, 6))
    with pytest.raises(ParallelError, match=r"this rank holds nothing of \(4, 6\), .*stage 1.*whole_parameters"):
        made.data_ptr()
    in_stages = Mesh((2,), 2)
    tied = Placement("w", (4,), TensorLayout(((),)), (), "test", in_stages, 2, 4, (0, 1), (0, 1))
    alone = Placement("w", (4,), TensorLayout(((0,),)), (), "test", in_stages, 2, 4, (1,), (1,))
    assert (tied.copies, alone.copies) == (4, 1)
    made.placement = tied
    for call in (lambda: is_held(made), lambda: tied.check_world("digest")):
        with pytest.raises(ParallelError, match=r"left (its|their) world: call .* before release\(\)"):
            call()


def test_the_whole_of_what_is_not_cut_is_a_copy_too():
    part = as_part(torch.ones(4), Placement("w", (4,), TensorLayout(((),)), (), "test", Mesh((1,)), 0, 1))
    part.full_tensor().zero_()
    assert part.to_local().tolist() == [1.0] * 4
