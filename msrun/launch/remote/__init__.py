"""What runs on each host of a job that one launcher drives."""
