"""MindSpore's own scheduler, at which the workers of real MindSpore meet. Run as a module, with MindSpore's variables.

MindSpore makes it of the user's script: in a process with MS_ROLE=MS_SCHED `init()` serves and never returns. It needs
no more than that call (tried with 2.10), so nothing of the user's runs in it.
"""

if __name__ == "__main__":
    from mindspore.communication import init  # type: ignore[import-not-found,unused-ignore]

    init()
