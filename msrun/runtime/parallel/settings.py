"""ParallelSettings: everything the user has asked of one AutoParallel. Frozen; each setter makes a new one."""

from __future__ import annotations

from dataclasses import dataclass

from msrun.errors import StrategyError, near_miss
from msrun.runtime.parallel.hsdp import HsdpSpec
from msrun.runtime.parallel.scaling import Compat, check_compat

MODES = ("semi_auto", "data_parallel")
DATASET_WORDS = ("data_parallel", "full_batch")
DatasetStrategy = str | tuple[tuple[int, ...], ...]


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

    def batch_parts(self, ranks: int) -> int:
        """Return how many parts the rows of the global batch are cut into over `ranks` ranks, as they come in.

        Of the network that runs as it is, rows are cut outside: the part of each rank is said where it is run.
        """
        if ranks == 1 or self.parallel_mode != "semi_auto" or self.dataset_strategy == "full_batch":
            return 1
        return ranks if isinstance(self.dataset_strategy, str) else self.dataset_strategy[0][0]
