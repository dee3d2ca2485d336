"""Which local operators give a table a gradient of rows alone, which never becomes dense."""

from __future__ import annotations

from torch import fx

from msrun.runtime.sharding.operators.lookup import embeds_sparsely
from msrun.runtime.sharding.operators.rows import bags_sparsely
from msrun.runtime.sharding.operators.table_lookup import looks_up_sparsely


def gives_rows(node: fx.Node) -> bool:
    """Return whether the table that a local operator reads gets a gradient of the rows that it looks up."""
    return embeds_sparsely(node) or looks_up_sparsely(node) or bags_sparsely(node)
