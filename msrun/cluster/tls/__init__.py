"""TLS of the connections between hosts and scheduler. Loaded for jobs with --tls_config only."""
