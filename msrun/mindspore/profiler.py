"""Profiler: torch's, in MindSpore's words. Each rank writes a trace that chrome://tracing and Perfetto show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.profiler

from msrun.mindspore.missing import missing_names
from msrun.mindspore.ops.table import refuse_unknown
from msrun.runtime import get_rank

__all__ = ["Profiler", "ProfilerActivity", "ProfilerLevel", "profile"]
__getattr__ = missing_names("profiler", __all__)

_WORDS = set(
    """
    profiler_level activities schedule on_trace_ready profile_memory aicore_metrics l2_cache hbm_ddr pcie
    data_process parallel_strategy op_time start_profile output_path with_stack profile_framework
    data_simplification sync_enable mstx hccs timeline_limit profile_communication
    """.split()
)


class ProfilerLevel:
    """MindSpore's levels; each records all operators here."""

    LevelNone, Level0, Level1, Level2 = -1, 0, 1, 2


class ProfilerActivity:
    """What is recorded."""

    CPU, GPU, NPU = 0, 1, 2


class Profiler:
    """Record the operators from now to `analyse()`, which writes OUTPUT_PATH/rank_N.json.

    Args:
        words: `output_path` (./data), `start_profile` (True), `profile_memory`; others change nothing here.

    Raises:
        UsageError: an unknown word.
    """

    def __init__(self, **words: Any) -> None:
        refuse_unknown("Profiler", words, _WORDS)
        self._folder = Path(words.get("output_path", "./data"))
        switches: dict[str, Any] = {word: bool(words.get(word, False)) for word in ("profile_memory", "with_stack")}
        self._profile = torch.profiler.profile(**switches)  # of the host, and of the device where there is one
        self._is_running = False
        if words.get("start_profile", True):
            self.start()

    def start(self) -> None:
        """Begin to record."""
        if not self._is_running:
            self._profile.start()
            self._is_running = True

    def stop(self) -> None:
        """End the record."""
        if self._is_running:
            self._profile.stop()
            self._is_running = False

    def step(self) -> None:
        """Say that a step ends."""
        self._profile.step()

    def analyse(
        self, offline_path: Any = None, pretty: bool = False, step_list: Any = None, mode: str = "sync"
    ) -> None:
        """End the record and write the trace of this rank."""
        self.stop()
        folder = Path(offline_path) if offline_path else self._folder
        folder.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(folder / f"rank_{get_rank()}.json"))

    def op_analyse(self, op_name: Any = None, device_id: int | None = None) -> str:
        """Return torch's table of the operators' times."""
        return str(self._profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30))

    def __enter__(self) -> Profiler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.analyse()


profile = Profiler
