"""`shm`: a backend of torch.distributed whose ranks are processes of one machine and meet in shared memory.

`import msrun.shm` registers it: `torch.distributed.init_process_group("shm")` then works in any script.
`init()` takes it for jobs on the CPU.
"""

from msrun.shm.process_group import register

register()
