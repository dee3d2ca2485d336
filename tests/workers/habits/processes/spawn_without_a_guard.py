import multiprocessing


def work() -> None:
    print("never")


child = multiprocessing.get_context("spawn").Process(target=work)
child.start()
child.join()
print(child.exitcode)
