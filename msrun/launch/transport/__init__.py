"""How the launcher reaches a host: a pipe to an agent there, over SSH or to a child process here."""
