import random

import numpy
import torch

print(torch.initial_seed() == torch.manual_seed(3).initial_seed(), torch.rand(1).item())
random.seed(3)
numpy.random.seed(3)
print(random.random(), numpy.random.rand())
