import torch


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 2, bias=False)


torch.manual_seed(0)
torch.save(Net(), "net.pt")
loaded = torch.load("net.pt", weights_only=False)
print(type(loaded).__module__, loaded)
