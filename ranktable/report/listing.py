"""A rank table as plain columns."""

from __future__ import annotations

from ranktable.model import RankTable
from ranktable.report.words import count_noun, plain


def render_table(table: RankTable) -> str:
    """Return the table as plain columns, one line per rank in ascending order."""
    placed = sorted(table.placements, key=lambda placement: placement[1].rank_id)
    rows = [("rank", "server_id", "device_id", "device_ip")]
    rows += [
        (str(device.rank_id), plain(server.server_id), str(device.device_id), plain(device.device_ip or "-"))
        for server, device in placed
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    size = f"{count_noun(len(table.servers), 'server')}, {count_noun(table.world_size, 'device')}"
    lines = [f"version {plain(table.dialect)}, status {plain(table.status)}, {size}"]
    lines += [f"{row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}  {row[3]}" for row in rows]
    return "\n".join(lines)
