"""Checkpoints: written by all ranks together, loaded by any number of ranks in any layout.

A checkpoint is a file with whole tensors, which torch.load reads, or a directory of parts of
`torch.distributed.checkpoint`: `*.distcp`, one per rank, `.metadata`, torch's index, and `tensors.json`, which says the
same without a pickle. In both, `state.pt` holds what is no tensor of a layout: optimizer settings and step counts,
random generators, what the user appended. Reading runs nothing that a checkpoint holds.
`checkpoint.json` says where training was, how large every file is, and its checksum. What was not written to its end
has another name, so it is never taken for a checkpoint (`directory`).

`save` decides, in the training's thread; `storage` writes over torch's plans, there or beside; `index` says where
tensors are, `reader` opens, `load` puts in place.
"""
