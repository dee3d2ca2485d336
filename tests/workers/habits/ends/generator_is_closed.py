def lines():
    try:
        while True:
            yield 1
    finally:
        print("generator closed", __name__)


generator = lines()
next(generator)
