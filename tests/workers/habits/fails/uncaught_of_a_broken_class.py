class Broken(Exception):
    def __str__(self) -> str:
        raise TypeError


raise Broken
