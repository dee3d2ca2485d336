import os

print("to the log")
saved = os.dup(1)
file = os.open("file.txt", os.O_WRONLY | os.O_CREAT)
os.dup2(file, 1)
print("to the file")
os.dup2(saved, 1)
print("to the log again")
