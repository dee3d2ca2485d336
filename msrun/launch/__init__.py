"""Driving a job from start to end: preflight, log directory, console, report."""
