import os

os.remove(__file__)
os.mkdir("gone")
os.chdir("gone")
os.rmdir("../gone")
print("in no folder")
