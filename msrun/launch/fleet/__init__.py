"""The launcher's side of a job over many hosts: all agents driven from here."""
