"""Each rank is another program: `each_rank_another.py PROGRAM ...` runs the one of its RANK, in a folder of its own."""

import os
import sys

__file__ = sys.argv[1 + int(os.environ["RANK"])]
sys.argv = [__file__]
os.mkdir(os.path.basename(__file__))
os.chdir(os.path.basename(__file__))
exec(compile(open(__file__, "rb").read(), __file__, "exec"))  # noqa: SIM115
