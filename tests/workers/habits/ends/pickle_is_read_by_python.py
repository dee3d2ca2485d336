import pickle
import subprocess
import sys


class Kept:
    x = 1


with open("kept.pickle", "wb") as file:
    pickle.dump(Kept(), file)
code = "import pickle\nclass Kept: pass\nprint(pickle.load(open('kept.pickle', 'rb')).__module__)"
subprocess.run([sys.executable, "-c", code])
