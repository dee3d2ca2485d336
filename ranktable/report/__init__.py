"""Text for people and JSON for programs out of reports and tables. Pure; printing is left to the command line."""
