"""Says how it was started."""

import json
import locale
import os
import resource
import signal
import sys
import warnings

import __main__

told = {
    "name": __name__,
    "file": __file__,
    "package": __package__,
    "spec": __spec__ and __spec__.name,
    "argv": sys.argv,
    "orig_argv": sys.orig_argv[1:],
    "path": sys.path[:2],
    "cwd": os.getcwd(),
    "main": vars(__main__) is globals(),
    "flags": str(sys.flags),
    "x": sys._xoptions,
    "warn_options": sys.warnoptions,
    "filters": [repr(entry[:3]) for entry in warnings.filters],
    "debug": __debug__,
    "doc": __doc__,
    "bytecode": (sys.dont_write_bytecode, sys.pycache_prefix),
    "files": sys.getfilesystemencoding(),
    "locale": (locale.setlocale(locale.LC_CTYPE, ""), locale.getpreferredencoding(do_setlocale=False)),
    "streams": [(stream.encoding, stream.errors) for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "umask": (os.umask(0o22), os.umask(0o22))[0],
    "nice": os.nice(0),
    "limits": [resource.getrlimit(limit) for limit in (resource.RLIMIT_CORE, resource.RLIMIT_STACK)],
    "ignored": [s.name for s in signal.Signals if signal.getsignal(s) == signal.SIG_IGN],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "hash": hash("x") if os.environ.get("PYTHONHASHSEED", "random") != "random" else None,
    "customized": [name for name in ("sitecustomize", "usercustomize") if name in sys.modules],
    "hooks": sys.breakpointhook is sys.__breakpointhook__,
    "variables": {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PYTHON", "LC_", "LANG", "SET_")) and name not in ("PYTHONUNBUFFERED", "PYTHONFAULTHANDLER")
    },
}
with open(os.environ.get("TOLD", "told.json"), "w") as file:
    json.dump(told, file, default=repr)
