"""flood.py LINES: write numbered lines to stdout, then bytes that are no text, then a last line without an end."""

import os
import sys

rank = int(os.environ["RANK"])
for number in range(int(sys.argv[1])):
    print(f"rank {rank} line {number} {'x' * (number % 97)}")
sys.stdout.flush()
sys.stdout.buffer.write(bytes(range(256)))
sys.stdout.buffer.flush()
sys.stderr.write("ünïcode ☃ on stderr\n")
sys.stdout.write("no end of line")
