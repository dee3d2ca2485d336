import multiprocessing


def work(value) -> None:
    value.value = 7


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    value = multiprocessing.Value("i", 0)
    child = multiprocessing.Process(target=work, args=(value,))
    child.start()
    child.join()
    print(value.value, multiprocessing.get_start_method())
