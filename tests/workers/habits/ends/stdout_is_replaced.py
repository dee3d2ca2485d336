import io
import sys

print("before")
sys.stdout = io.StringIO()
print("kept by the script")
