"""What will run where. Pure: nothing here opens a socket, starts a process or reads the launcher's environment."""
