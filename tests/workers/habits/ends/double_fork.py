import os

reader, writer = os.pipe()
pid = os.fork()
if pid == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    os.write(writer, b"daemon")
    os._exit(0)
os.waitpid(pid, 0)
os.close(writer)
print(os.read(reader, 10))
