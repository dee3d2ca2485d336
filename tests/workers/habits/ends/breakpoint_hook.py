import os

os.environ["PYTHONBREAKPOINT"] = "builtins.print"
breakpoint("called")
