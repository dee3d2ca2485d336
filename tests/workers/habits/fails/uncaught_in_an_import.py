import os
import sys

with open("broken.py", "w") as file:
    file.write("def f():\n    raise ValueError('at import')\nf()\n")
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
import broken  # noqa: E402, F401
