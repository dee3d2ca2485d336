import os

print(os.waitstatus_to_exitcode(os.system("exit 3")), os.spawnlp(os.P_WAIT, "sh", "sh", "-c", "exit 4"))
print(os.popen("echo out").read())
