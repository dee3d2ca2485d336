"""Checkpoints: written by all ranks together, loaded by any number of ranks in any layout.

A checkpoint is a file with whole tensors, which torch.load reads (`plain_file`), or a directory of parts in the format
of `torch.distributed.checkpoint` (`tensor_files`): `*.distcp`, one per rank, `tensors.json`, which says where each part
lies (`part_index`), and `.metadata`, which says the same to torch (`dcp_metadata`). In both, `state.pt` holds what is
no tensor of a layout: optimizer settings and step counts, random generators, what the user appended. Reading runs
nothing that a checkpoint holds.
`checkpoint.json` says where training was, how large every file is, and its checksum. What was not written to its end
has another name, so it is never taken for a checkpoint.

`save` decides, `writing` writes, in the training's thread or in `background`; `reader` opens, `load` puts in place.
"""
