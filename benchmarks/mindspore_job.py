"""The job of `launch.py --mindspore`: join, one AllReduce, leave. The same file runs under MindSpore's msrun and ours.

With `fail FOLDER` the last rank ends with EXIT_CODE after the AllReduce, and writes when into FOLDER/died, as seconds
of CLOCK_MONOTONIC; the others sleep.
"""

import os
import sys
import time
from pathlib import Path

EXIT_CODE = 7

if __name__ == "__main__":
    import mindspore as ms
    import numpy as np
    from mindspore.communication import get_group_size, get_rank, init

    ms.set_context(device_target="CPU")
    init()
    total = ms.ops.AllReduce()(ms.Tensor(np.ones(1, np.float32)))
    if float(total[0]) != get_group_size():
        sys.exit(f"AllReduce gave {total}, not {get_group_size()}")
    if sys.argv[1:2] == ["fail"]:
        if get_rank() == get_group_size() - 1:
            Path(sys.argv[2], "died").write_text(repr(time.monotonic()))
            os._exit(EXIT_CODE)
        time.sleep(600)
