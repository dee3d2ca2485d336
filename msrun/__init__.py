"""msrun: start a parallel-training job with one command, explain a failure on one screen, train on any layout.

The launcher (`planning`, `cluster`, `agent`, `launch`, `cli`) never imports torch. What runs inside a worker is
`msrun.runtime`. The two halves meet through the environment variables and files of `msrun.contract`.
"""

__version__ = "0.1.0"
