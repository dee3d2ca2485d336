"""ParallelSettings: everything the user has asked of one AutoParallel. Frozen; each setter makes a new one."""

from __future__ import annotations

from dataclasses import dataclass

from msrun.errors import StrategyError, near_miss
from msrun.runtime.named_layout import Layout
from msrun.runtime.parallel.hsdp import HsdpSpec
from msrun.runtime.parallel.scaling import Compat, check_compat

MODES = ("semi_auto", "data_parallel")
DATASET_WORDS = ("data_parallel", "full_batch")
DatasetStrategy = str | tuple[tuple[int, ...] | Layout, ...]


@dataclass(frozen=True)
class ParallelSettings:
    """What was asked.

    Raises:
        StrategyError: a word that is not known.
    """

    parallel_mode: str = "semi_auto"
    compat: Compat = "torch"
    hsdp: HsdpSpec | None = None
    dataset_strategy: DatasetStrategy = "data_parallel"
    """What each rank passes: its own part of the batch, all of it, or parts per dimension for each input."""
    is_strict: bool = False
    """Refuse traffic between layouts that the user did not ask for."""

    def __post_init__(self) -> None:
        if self.parallel_mode not in MODES:
            raise StrategyError(
                f"parallel_mode={self.parallel_mode!r}{near_miss(str(self.parallel_mode), MODES)}: "
                f"must be {' or '.join(MODES)}"
            )
        check_compat(self.compat)
        config = self.dataset_strategy
        if isinstance(config, str) and config not in DATASET_WORDS:
            raise StrategyError(
                f"dataset_strategy({config!r}){near_miss(config, DATASET_WORDS)}: "
                "must be data_parallel, full_batch or a tuple of tuples"
            )
        if not isinstance(config, str):
            wrong = [entry for entry in config if isinstance(entry, Layout) and entry.tensor_map is None]
            if wrong:
                raise StrategyError(f"dataset_strategy: call {wrong[0]} with axis names, e.g. layout('dp', 'None')")
