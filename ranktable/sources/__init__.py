"""Where hosts, devices and addresses come from: host lists, host files, schedulers, address files, this host."""
