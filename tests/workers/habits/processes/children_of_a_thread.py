import subprocess
import threading

results = []
threads = [threading.Thread(target=lambda: results.append(subprocess.call(["true"]))) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(results)
