import torch


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


print(double(torch.ones(2)).tolist())
print(torch.fx.symbolic_trace(torch.nn.ReLU())(torch.ones(1)).item())
