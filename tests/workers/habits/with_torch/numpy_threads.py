import os

os.environ["OPENBLAS_NUM_THREADS"] = "2"
import numpy

numpy.ones((300, 300)) @ numpy.ones((300, 300))
print(os.environ["OPENBLAS_NUM_THREADS"], len(os.listdir("/proc/self/task")))
