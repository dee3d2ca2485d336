"""Why one try to reach a host came to nothing; the connector makes a ClusterError of it."""

from __future__ import annotations


class SshFault(Exception):
    """One line without the host's name: what happened, and the remedy."""

    def __init__(self, text: str, *, is_temporary: bool = False) -> None:
        """`is_temporary`: another try a moment later may go well."""
        super().__init__(text)
        self.text = text
        self.is_temporary = is_temporary
