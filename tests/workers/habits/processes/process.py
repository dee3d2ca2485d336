import multiprocessing
import sys


class Message:
    def __init__(self, text: str) -> None:
        self.text = text


def work(queue, event) -> None:
    event.wait()
    queue.put(Message("from " + multiprocessing.current_process().name))
    sys.exit(4)


if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue, event = context.Queue(), context.Event()
    child = context.Process(target=work, args=(queue, event), name="one")
    child.start()
    event.set()
    print(queue.get().text)
    child.join()
    print(child.exitcode)
