"""Why one try to reach a host came to nothing; the connector makes a ClusterError of it."""

from __future__ import annotations


class SshFault(Exception):
    """One line without the host's name: what happened, and the remedy."""

    def __init__(self, text: str, *, is_temporary: bool = False, is_late: bool = False) -> None:
        """
        Args:
            is_temporary: another try a moment later may go well.
            is_late: there is no time for one.
        """
        super().__init__(text)
        self.text = text
        self.is_temporary = is_temporary
        self.is_late = is_late


def reason_of(error: Exception) -> str:
    """Return what an exception of paramiko says, in one line; a refusal of the server has its reason in `text`."""
    text = str(getattr(error, "text", "") or error).strip()
    return text.partition("\n")[0].rstrip(".") or "connection closed"
