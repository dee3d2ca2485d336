"""The modes that need no captured graph: torch's DDP and FSDP2, and networks cut by hand."""
