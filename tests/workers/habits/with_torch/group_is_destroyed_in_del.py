import torch.distributed as dist


class Trainer:
    def __init__(self) -> None:
        dist.init_process_group("gloo")

    def __del__(self) -> None:
        dist.destroy_process_group()
        print("destroyed")


trainer = Trainer()
print(dist.get_world_size())
