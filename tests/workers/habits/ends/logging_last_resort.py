import logging

logging.warning("to stderr")
logging.getLogger("x").info("not shown")
logging.getLogger("x").error("%s and %d", "a", "no number")
