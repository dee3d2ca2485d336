"""Checkpoints: written once by all ranks together, loaded by any number of ranks in any layout.

A checkpoint is a directory. Its tensors are in the format of `torch.distributed.checkpoint`, which torch's own tools
read too: `*.distcp`, one per rank, and `.metadata`. `state.pt` holds what is no tensor of a layout: optimizer settings
and step counts, random generators, what the user appended. `checkpoint.json` says where training was and how large
every file is. A directory that was not written to its end has another name, so it is never taken for a checkpoint.
"""
