import faulthandler


def inner() -> None:
    faulthandler.dump_traceback(all_threads=False)


inner()
