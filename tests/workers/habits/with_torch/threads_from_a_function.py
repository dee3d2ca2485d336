from os import environ


def configure() -> None:
    environ["OMP_NUM_THREADS"] = "2"


configure()


def main() -> None:
    import torch

    print(torch.get_num_threads())


main()
