import os
import sys

with open("holder.py", "w") as file:
    file.write(
        "import json\nclass Held:\n  def __del__(self): print(json.dumps([1]), NAME)\nNAME = 'x'\nheld = Held()\n"
    )
sys.path.insert(0, os.getcwd())
sys.dont_write_bytecode = True
import holder  # noqa: E402

print(holder.NAME)
