"""What a cluster manager or another launcher tells of this host's place in a job, read from environment variables."""
