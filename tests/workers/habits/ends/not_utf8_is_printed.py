import os
import sys

os.write(1, b"bytes \xff\n")
print("surrogate", os.fsdecode(b"\xff"))
print("snowman ☃", file=sys.stderr)
print("surrogate", os.fsdecode(b"\xff"), file=sys.stderr)
