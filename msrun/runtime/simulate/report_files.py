"""The files of a dry run's report: simulation.json, the page, the trace for Perfetto."""

from __future__ import annotations

import json
import os
from pathlib import Path

from msrun import contract
from msrun.errors import WorldError
from msrun.runtime.simulate.page import render_page
from msrun.runtime.simulate.report import Report
from msrun.runtime.simulate.step_trace import build_trace


def write_report(report: Report, folder: Path) -> None:
    """Write simulation.json, the page and, where time was looked at, the trace; each whole or not at all.

    Raises:
        WorldError: a file cannot be written.
    """
    files = {contract.SIMULATION_JSON: json.dumps(report.to_json(), indent=1) + "\n"}
    if report.level:
        files[contract.SIMULATION_HTML] = render_page(report)
    if report.job.step is not None:
        files[contract.SIMULATION_TRACE] = json.dumps(build_trace(report.job), separators=(",", ":")) + "\n"
    for name, text in files.items():
        path = folder / name
        temporary = path.with_name(f".{name}.{os.getpid()}")
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.chmod(contract.FILE_MODE)
            temporary.replace(path)
        except OSError as error:
            raise WorldError(f"{path}: cannot be written ({error.strerror}); give another --log_dir") from None
