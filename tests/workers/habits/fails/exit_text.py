import sys

sys.exit("what went wrong ☃")
