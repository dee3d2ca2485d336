"""`shm`: a backend of torch.distributed whose ranks are processes of one machine and meet in shared memory.

`import msrun.runtime` registers it; `init()` takes it for CPU jobs of one host, and
`torch.distributed.init_process_group("shm")` works in any script.
"""

from msrun.runtime.shm.registration import register

register()
