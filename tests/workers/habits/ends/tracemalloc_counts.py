import tracemalloc

tracemalloc.start()
kept = [bytes(1000) for _ in range(100)]
print(tracemalloc.get_traced_memory()[0] > 100_000, tracemalloc.get_object_traceback(kept[0])[0].lineno)
