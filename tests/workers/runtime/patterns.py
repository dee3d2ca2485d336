"""Runs every pattern of call_patterns on every rank; RESULT.json says which went wrong, and how.

usage: patterns.py RESULT.json [name ...]
"""

import json
import sys
import traceback
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from call_patterns import PATTERNS, WORLD_SIZE
from only_cases import is_asked

from msrun.runtime import get_rank, init, release

init(timeout_s=120)
torch.set_default_dtype(torch.float64)
warnings.simplefilter("ignore")
results = {}
for name in sys.argv[2:] or filter(is_asked, PATTERNS):
    try:
        PATTERNS[name]()
        found = ""
    except Exception:
        found = traceback.format_exc()
    everyone = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, found)
    results[name] = [f"rank {rank}: {text}" for rank, text in enumerate(everyone) if text]
if get_rank() == 0:
    Path(sys.argv[1]).write_text(json.dumps(results))
release()
