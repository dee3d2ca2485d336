"""What becomes of a job of several hosts once all have come. Pure: reports of hosts in, orders to all hosts out.

The first failure counts, in the order in which reports arrive; it ends the job on every host. When every host has ended
its part, the job is over, or starts again everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from msrun import contract
from msrun.cluster.membership import describe_absent
from msrun.cluster.messages import Message
from msrun.cluster.restart import RestartPolicy
from msrun.planning.ranks import fold_ranks

MAX_TEXT = 4096
MAX_REPORT_KEYS = 32


@dataclass(frozen=True)
class Verdict:
    """Why the job, or one attempt of it, failed."""

    node_rank: int
    """Whose failure it was; -1 when nobody reported it: a host was lost."""
    reason: str
    """One line, with rank and host."""
    exit_code: int
    kind: str = "fault"
    """`worker`, `hang` or `fault`."""
    wait_status: int | None = None
    """How the first worker failed, as waitpid gives it."""
    can_restart: bool = False
    worker: Mapping[str, Any] | None = None
    """The failed worker in the words of the failure file."""
    lost_peer: bool = False
    """Its last words are that another rank has gone, and that one was not of its host."""

    def to_json(self) -> dict[str, Any]:
        """Return a JSON-able dict."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_json(cls, value: object) -> Verdict:
        """Inverse of `to_json`; what another host says is cut to size and to its types."""
        given = value if isinstance(value, Mapping) else {}
        worker, status = given.get("worker"), given.get("wait_status")
        exit_code = given.get("exit_code")
        return cls(
            node_rank=_count(given.get("node_rank"), -1),
            reason=str(given.get("reason", "failed"))[:MAX_TEXT],
            exit_code=exit_code if type(exit_code) is int and 0 < exit_code < 256 else contract.EXIT_CLUSTER,
            kind=str(given.get("kind"))[:MAX_TEXT],
            wait_status=status if type(status) is int and 0 <= status < 1 << 16 else None,
            can_restart=given.get("can_restart") is True,
            worker=worker if isinstance(worker, Mapping) and len(worker) <= MAX_REPORT_KEYS else None,
            lost_peer=given.get("lost_peer") is True,
        )


def _count(value: object, default: int) -> int:
    return value if type(value) is int and value >= 0 else default


class Fleet:
    """All hosts of a job. Owned by the scheduler's thread; every method returns what all hosts are to be told."""

    def __init__(self, nodes: Iterable[int], policy: RestartPolicy) -> None:
        self._nodes = set(nodes)
        self._policy = policy
        self._busy = set(self._nodes)
        """Those that have not ended their part of the attempt."""
        self._unready = set(self._nodes)
        """Those that could not start their workers again yet."""
        self._done: dict[int, int] = {}
        """Rank -> node of those that have finished in this attempt."""
        self._absent: set[int] = set()
        """Those of them that never joined the world."""
        self._come: set[int] = set()
        """Those of hosts that have ended which joined it."""
        self._is_last = False
        self.attempt = 0
        self.verdict: Verdict | None = None
        """Of the current attempt; of the last one when the job is over."""
        self.is_over = False

    def failed(self, attempt: int, verdict: Verdict) -> list[Message]:
        """A host reports a failure. Only the first of an attempt counts."""
        if self.is_over or attempt != self.attempt or self.verdict is not None:
            return []
        self.verdict = verdict = self._with_deserters(verdict)
        self._is_last |= not verdict.can_restart
        return [{"type": "stop", "attempt": attempt, "verdict": verdict.to_json()}]

    def _with_deserters(self, verdict: Verdict) -> Verdict:
        """Say who had finished before, where that is why another host's rank has failed."""
        done = {rank: node for rank, node in self._done.items() if node != verdict.node_rank}
        if not (verdict.lost_peer and done):
            return verdict
        who = f"rank {fold_ranks(done)} on node {fold_ranks(set(done.values()))}"
        failed = verdict.reason.replace(" failed first: ", " then failed: ", 1)
        return replace(verdict, reason=f"{who} exited early (code 0); {failed}")

    def done(self, node_rank: int, attempt: int, global_rank: int, *, has_come: bool = True) -> list[Message]:
        """A rank has finished. `has_come`: it had joined the world; who joins one that it has not waits in vain."""
        if self.is_over or attempt != self.attempt:
            return []
        self._done[global_rank] = node_rank
        if has_come:
            return []
        self._absent.add(global_rank)
        is_first = len(self._absent) == 1  # enough for the others to look; a job that joins nothing has many
        return [{"type": "absent", "attempt": attempt, "ranks": [global_rank]}] if is_first else []

    def ended(self, node_rank: int, attempt: int, *, can_continue: bool, come: Iterable[int] = ()) -> list[Message]:
        """All workers of a host have ended, or none was started. `come`: those that had joined the world."""
        if self.is_over or attempt != self.attempt or node_rank not in self._busy:
            return []
        self._is_last |= not can_continue
        self._busy.discard(node_rank)
        self._come.update(come)
        orders: list[Message] = []
        if self._absent and self._come:
            reason = describe_absent(self._absent, self._come)
            orders = self.failed(attempt, Verdict(-1, reason, contract.EXIT_CLUSTER))
        return [*orders, *self._conclude()]

    def ready(self, node_rank: int, attempt: int) -> list[Message]:
        """A host could start its workers again."""
        if self.is_over or attempt != self.attempt or node_rank not in self._unready:
            return []
        self._unready.discard(node_rank)
        return [] if self._unready else [{"type": "start", "attempt": attempt}]

    def lost(self, node_rank: int, reason: str) -> list[Message]:
        """A host has gone without having been told that the job is over."""
        if self.is_over or node_rank not in self._nodes:
            return []
        self._nodes.discard(node_rank)
        self._busy.discard(node_rank)
        self._is_last = True
        orders: list[Message] = []
        if self.verdict is None:
            orders = self.failed(self.attempt, Verdict(-1, reason, contract.EXIT_CLUSTER))
        return [*orders, *self._conclude()]

    def _conclude(self) -> list[Message]:
        if self._busy:
            return []
        delay_s = None
        if self.verdict is not None and not self._is_last:
            delay_s = self._policy.delay_s(self.attempt, self.verdict.wait_status)
        if delay_s is None:
            self.is_over = True
            return [{"type": "over", "verdict": self.verdict.to_json() if self.verdict else None}]
        self.attempt += 1
        self.verdict = None
        self._done.clear()
        self._absent.clear()
        self._come.clear()
        self._busy, self._unready = set(self._nodes), set(self._nodes)
        return [{"type": "restart", "attempt": self.attempt, "delay_s": delay_s}]
