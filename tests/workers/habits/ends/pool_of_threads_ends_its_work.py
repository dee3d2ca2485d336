import time
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(2)
pool.submit(lambda: (time.sleep(0.1), print("work is done")))
print("main ends")
