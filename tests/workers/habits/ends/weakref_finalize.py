import weakref


class Held:
    pass


held, other = Held(), Held()
weakref.finalize(held, print, "finalize held")
weakref.finalize(other, print, "finalize other").atexit = False
