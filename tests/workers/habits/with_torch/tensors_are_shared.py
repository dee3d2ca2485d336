import torch
import torch.multiprocessing as mp


def work(tensor: torch.Tensor, queue) -> None:
    tensor += 1
    queue.put(tensor.sum().item())


if __name__ == "__main__":
    context = mp.get_context("spawn")
    tensor, queue = torch.zeros(3).share_memory_(), context.Queue()
    child = context.Process(target=work, args=(tensor, queue))
    child.start()
    print(queue.get(), child.join(), tensor.tolist())
