import multiprocessing

if __name__ == "__main__":
    multiprocessing.freeze_support()
    print(
        multiprocessing.spawn.is_forking(["x"]), multiprocessing.spawn.get_executable() == __import__("sys").executable
    )
