import atexit
import logging
import logging.handlers
import queue

records: queue.Queue = queue.Queue()
listener = logging.handlers.QueueListener(records, logging.FileHandler("log.txt"))
listener.start()
atexit.register(listener.stop)
log = logging.getLogger("q")
log.addHandler(logging.handlers.QueueHandler(records))
for number in range(20):
    log.warning("record %d", number)
