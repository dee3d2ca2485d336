import logging
import logging.handlers

handler = logging.handlers.MemoryHandler(100, target=logging.FileHandler("log.txt", delay=True))
logging.getLogger().addHandler(handler)
logging.getLogger("train").warning("kept until shutdown")
