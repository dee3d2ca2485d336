"""The `msrun` command: its options and where their values come from, its help, and what it runs."""

from __future__ import annotations

from msrun.cli.launch_command import command, main

__all__ = ["command", "main"]
