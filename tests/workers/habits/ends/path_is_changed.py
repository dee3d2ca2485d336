import os
import sys

os.mkdir("lib")
with open("lib/own.py", "w") as file:
    file.write("VALUE = 1\n")
sys.dont_write_bytecode = True
os.chdir("lib")
sys.path.append("")
import own  # noqa: E402

print(own.VALUE, own.__file__ == os.path.join(os.getcwd(), "own.py"))
