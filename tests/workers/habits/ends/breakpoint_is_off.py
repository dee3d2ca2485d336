import os

os.environ["PYTHONBREAKPOINT"] = "0"
breakpoint()
print("went on")
