import torch
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


if __name__ == "__main__":
    for context in ("fork", "spawn"):
        for batch in DataLoader(Numbers(), batch_size=3, num_workers=2, multiprocessing_context=context):
            print(context, batch.flatten().tolist())
