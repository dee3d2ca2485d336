"""msrun: start a parallel-training job with one command, explain a failure on one screen, train on any layout.

The launcher (`planning`, `cluster`, `agent`, `launch`, `cli`) never imports torch. What runs inside a worker is
`msrun.runtime`. The two halves meet through the environment variables and files of `msrun.contract`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msrun.launch.function import run as run

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "run":
        from msrun.launch.function import run

        return run
    raise AttributeError(f"module 'msrun' has no attribute {name!r}")
