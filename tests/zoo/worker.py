"""Trains models of the zoo on every rank; what came out is added, line by line, to FOLDER/RANK.jsonl.

usage: worker.py FOLDER DEADLINE_S, with the cases, pairs of a model and a mode, as JSON in FOLDER/cases.json
"""

import faulthandler
import json
import logging
import sys
import time
import warnings
from pathlib import Path

import torch.distributed as dist

from msrun.runtime import get_rank, init, release
from zoo.collection import ENTRIES
from zoo.training import References, outcome

folder, deadline_s = Path(sys.argv[1]), float(sys.argv[2])
init(timeout_s=600)  # above the deadline of a case, whose stacks say more
warnings.simplefilter("ignore")
logging.getLogger("msrun.runtime").setLevel(logging.ERROR)
ready = dist.new_group(backend="gloo")  # of its own: a rank that was left alone waits in the other one
references = {}
with Path(folder, f"{get_rank()}.jsonl").open("a") as lines:
    for model, mode in json.loads(Path(folder, "cases.json").read_text()):
        faulthandler.dump_traceback_later(deadline_s, exit=True)
        print(json.dumps({"model": model, "mode": mode}), file=lines, flush=True)
        start = time.monotonic()
        if model not in references:
            references = {model: References(ENTRIES[model])}
        found = outcome(ENTRIES[model], mode, references[model])
        seconds = time.monotonic() - start
        print(json.dumps({"model": model, "mode": mode, "seconds": seconds, **found}), file=lines, flush=True)
        dist.barrier(group=ready)
faulthandler.cancel_dump_traceback_later()
release()
