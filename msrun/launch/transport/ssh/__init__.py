"""Agents over SSH: one connection and one exec per host, on paramiko, by the rules of OpenSSH's client."""
