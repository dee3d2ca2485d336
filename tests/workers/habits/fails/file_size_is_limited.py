import resource

resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
with open("large.txt", "w") as file:
    file.write("x" * 100)
