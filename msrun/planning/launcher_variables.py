"""Variables that name msrun's own place in the job of another launcher; its workers must not take it for theirs.

A worker that calls MPI_Init with them would speak for the rank that mpirun gave to msrun, as would its siblings; a
torchrun that a worker starts would take PET_NNODES for its own. Those of Slurm and Kubernetes stay: they are true of
the host and of the allocation, and programs read them, SLURM_JOB_ID for names; torch and MindSpore do not.
"""

from __future__ import annotations

import re

_OF_LAUNCHER = re.compile(
    r"(PMI_|PMIX_(?!MCA_)|PRTE_(?!MCA_)|OMPI_COMM_WORLD_|OMPI_WORLD_|OMPI_MCA_orte_|OMPI_MCA_ess_base_|PET_RDZV_)\w+\Z"
    r"|OMPI_(APP_CTX_NUM_PROCS|ARGV|COMMAND|FILE_LOCATION|FIRST_RANKS|NUM_APP_CTX|TOOL_NAME|UNIVERSE_SIZE)\Z"
    r"|OMPI_MCA_(ess|initial_wdir|num_procs|pmix)\Z"
    r"|PET_(NNODES|NODE_RANK|NPROC_PER_NODE|MASTER_ADDR|MASTER_PORT)\Z"
)


def is_of_launcher(name: str) -> bool:
    """Return whether a variable tells a process its place in mpirun's, PMI's or torchrun's job."""
    return bool(_OF_LAUNCHER.match(name))
