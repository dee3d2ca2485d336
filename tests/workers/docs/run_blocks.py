"""Run the Python blocks of all pages on every rank of one job.

    run_blocks.py BLOCKS.json RESULTS

BLOCKS.json is a list of pages; a page is a list of {"place", "path", "line", "code", "name"}, whose blocks share their
names. A block with a `name` is a script: it has names of its own, and what it prints is kept. Rank r writes
RESULTS/r.json: {"faults": ["place: error", ...], "printed": {place of the script: text}}. The first fault ends a page.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

import torch

import msrun.runtime

pages = json.loads(Path(sys.argv[1]).read_text())
results = Path(sys.argv[2])
msrun.runtime.init()
msrun.runtime.init = lambda: None  # blocks call it again
faults, printed = [], {}
for page in pages:
    shared = ModuleType("__main__")
    for block in page:
        # Lines of tracebacks are those of the page.
        code = compile("\n" * (block["line"] - 1) + block["code"], block["path"], "exec", dont_inherit=True)
        said = io.StringIO()
        sys.modules["__main__"] = module = ModuleType("__main__") if block["name"] else shared  # torch looks there
        torch.manual_seed(0)
        arguments, sys.argv = sys.argv, [block["path"], "1"]
        try:
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                exec(code, vars(module))
        except Exception:
            faults.append(f"{block['place']}: {traceback.format_exc()}")
            print(faults[-1], flush=True)  # in the log, for the others may wait for this rank now
            break
        finally:
            sys.argv = arguments
        if block["name"]:
            printed[block["place"]] = said.getvalue()
logging.shutdown()
(results / f"{os.environ['RANK']}.json").write_text(json.dumps({"faults": faults, "printed": printed}))
