"""MindSpore's own scheduler: the workers of real MindSpore meet at it. Run as a module, with MindSpore's variables set.

MindSpore starts it from the user's script, whose `init()` serves in a process with MS_ROLE=MS_SCHED and never returns. No
script is needed for that (MindSpore 2.3 to 2.10), and so nothing of the user's runs in it.
"""

if __name__ == "__main__":
    from mindspore.communication import init

    init()
