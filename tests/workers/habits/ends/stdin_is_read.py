import sys

try:
    print(repr(input()))
except EOFError:
    print("end of file")
print(repr(sys.stdin.readline()))
