"""What happens on one host: the fork server, the worker processes, their end, and the agent's event loop."""
