"""The three parts of a training step with gradient accumulation, as MindSpore's example names them."""

from contextlib import nullcontext


class TrainForwardBackward:
    """Forward and backward pass of a part of the batch; gradients add up in the parameters."""

    def __init__(self, network, mini_steps):
        self.network, self.mini_steps = network, mini_steps

    def __call__(self, *inputs, is_last=True):
        waits = nullcontext() if is_last or not hasattr(self.network, "no_sync") else self.network.no_sync()
        with waits:
            loss = self.network(*inputs)
            (loss / self.mini_steps).backward()
        return loss.detach()


class TrainOptim:
    """The step of the optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __call__(self):
        self.optimizer.step()


class TrainClear:
    """Clear the gradients."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __call__(self):
        self.optimizer.zero_grad()
