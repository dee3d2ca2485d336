"""How processes of a host start, end and are held: the fork server and what it forks."""
