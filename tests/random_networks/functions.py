"""Custom autograd Functions whose backward is not the derivative of their forward."""

import torch


class StraightThrough(torch.autograd.Function):
    """Rounds; the gradient passes."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(x * 4) / 4

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversal(torch.autograd.Function):
    """The identity; the gradient comes back with the other sign."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * -ctx.factor, None


class Clamp(torch.autograd.Function):
    """Clamps; outside of the limits a tenth of the gradient passes."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.save_for_backward(x)
        ctx.limit = limit
        return x.clamp(-limit, limit)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= ctx.limit, gradient, gradient * 0.1), None


class TwoResults(torch.autograd.Function):
    """Two results, whose gradients are exchanged."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, torch.tanh(x)

    @staticmethod
    def backward(ctx, first, second):
        return first + 0.5 * second


class OwnScale(torch.autograd.Function):
    """x * scale, where the scale, one number, learns at half speed."""

    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, 0.5 * (gradient * x).sum()


class OwnLinear(torch.autograd.Function):
    """x @ weight.T with a backward pass written by hand; the weight learns at half speed."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        rows, columns = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        return gradient @ weight, 0.5 * rows.t() @ columns


class Normalized(torch.autograd.Function):
    """Looks at all values at once, and has two results."""

    @staticmethod
    def forward(ctx, x, weight):
        norm = x.norm()
        ctx.save_for_backward(x, norm, weight)
        ctx.mark_non_differentiable(norm)
        return x / norm * weight, norm

    @staticmethod
    def backward(ctx, gradient, _):
        x, norm, weight = ctx.saved_tensors
        return gradient * weight / norm, (gradient * x / norm).sum(0)
