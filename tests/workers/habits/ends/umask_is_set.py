import os

os.umask(0o077)
open("private.txt", "w").close()
print(oct(os.stat("private.txt").st_mode))
