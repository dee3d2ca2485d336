"""Runs the cases of one or more modules, tests/cases/mode_*.py, in one process group.

usage: modes.py RESULT.json MODULE...; the file holds what each case returned on every rank, or its traceback. BACKEND
names another backend than the CPU's, SHARED_DEVICE the one device that all ranks are to use.
"""

import importlib
import json
import logging
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from only_cases import is_asked

from msrun.runtime import get_group_size, get_rank, init, release


def run(case):
    try:
        return case()
    except Exception:
        return {"error": traceback.format_exc()}


def main():
    if "SHARED_DEVICE" in os.environ:
        os.environ["CUDA_VISIBLE_DEVICES"], os.environ["DEVICE_ID"] = os.environ["SHARED_DEVICE"], "0"
    init(os.environ.get("BACKEND"), timeout_s=120)
    torch.set_num_threads(1)
    logging.getLogger().addHandler(logging.NullHandler())
    results = {}
    for name in sys.argv[2:]:
        for key, case in importlib.import_module(name).cases(get_group_size()).items():
            if not is_asked(key):
                continue
            everyone = [None] * get_group_size()
            dist.all_gather_object(everyone, run(case))
            results[key] = everyone
    if get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    release()


main()
