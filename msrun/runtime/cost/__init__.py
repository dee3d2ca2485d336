"""What compute and communication cost, in seconds and bytes: devices, operators, collectives. Pure."""
