import os
import sys

with open("fractions.py", "w") as file:
    file.write("MINE = True\n")
with open("dataclasses.py", "w") as file:
    file.write("MINE = True\n")
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
import dataclasses  # noqa: E402
import fractions  # noqa: E402

print(hasattr(fractions, "MINE"), hasattr(dataclasses, "MINE"))
