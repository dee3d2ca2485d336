"""Which worker gets which device, cores, threads and memory. Pure."""
