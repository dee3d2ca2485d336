"""This rank's part of a parameter, a gradient or a state, and how far it is from one process' whole."""

from torch.distributed.tensor import DTensor

from msrun.runtime.execute.placement import placement_of


def local(tensor):
    """Return what this rank holds as an ordinary tensor."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()


def held(tensor, parameter):
    """Return what `local` does, or the whole of a DTensor that msrun has not placed.

    Args:
        parameter: whose value or gradient it is.
    """
    is_foreign = isinstance(tensor, DTensor) and placement_of(parameter) is None
    return tensor.detach().full_tensor() if is_foreign else local(tensor)


def part_of(whole, parameter):
    """Return what this rank should hold of the whole value of a parameter."""
    placed = placement_of(parameter)
    return whole.detach() if placed is None else placed.cut(whole.detach())


def difference(mine, right, parameter=None):
    """Return the largest difference relative to the largest value, of this rank's part or of a whole DTensor.

    Args:
        parameter: whose gradient `mine` is.
    """
    parameter = mine if parameter is None else parameter
    found, part = held(mine, parameter), part_of(right, parameter)
    assert found.shape == part.shape, (found.shape, part.shape)
    return float((found - part).abs().max() / right.detach().abs().max()) if found.numel() else 0.0


def weight_difference(network, right):
    """Return the largest difference of all weights."""
    pairs = zip(network.parameters(), right.parameters(), strict=True)
    return max(difference(one, other) for one, other in pairs)
