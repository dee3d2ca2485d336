import runpy
import sys

with open("other.py", "w") as file:
    file.write(
        "import sys\nprint(__name__, __file__, sys.argv[0] == __file__, vars(sys.modules['__main__']) is globals())\n"
    )
runpy.run_path("other.py", run_name="__main__")
print(runpy.run_module("keyword")["__name__"], sys.modules["__main__"].__dict__ is globals())
