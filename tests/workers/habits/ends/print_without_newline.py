import sys

print("no newline", end="")
sys.stderr.write("nor here")
