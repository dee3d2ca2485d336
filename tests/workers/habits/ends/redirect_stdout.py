import contextlib
import io

with contextlib.redirect_stdout(io.StringIO()) as kept:
    print("kept")
with open("out.txt", "w") as file, contextlib.redirect_stderr(file):
    print("main", kept.getvalue())
