import os

print("kept, for it was a line")
os._exit(7)
