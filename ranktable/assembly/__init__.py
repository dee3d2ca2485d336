"""Tables out of what the sources found: hosts, devices, super pods, held to the rules."""
