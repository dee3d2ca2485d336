"""The hosts of a job that one command starts on many: lists of them, and what they get from here."""
