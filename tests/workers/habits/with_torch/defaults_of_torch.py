import torch

print(torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled())
print(torch.initial_seed() != 0, torch.get_num_interop_threads() > 0, torch.multiprocessing.get_sharing_strategy())
print(torch.__config__.parallel_info().splitlines()[0], torch.backends.mkldnn.is_available())
