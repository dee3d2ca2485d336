import os
import sys

if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    print("first")
    os.execv(sys.executable, [sys.executable, __file__, *sys.argv[1:]])
print("second")
