import multiprocessing

if __name__ == "__main__":
    try:
        multiprocessing.get_context("spawn").Process(target=lambda: None).start()
    except Exception as error:
        print(type(error).__name__, "lambda" in str(error))
