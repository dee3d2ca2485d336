import random

with open("/proc/self/stat") as file:
    seed = random.getrandbits(64)
print(seed != random.Random(0).getrandbits(64))
