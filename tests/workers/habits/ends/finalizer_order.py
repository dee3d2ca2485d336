class Named:
    def __init__(self, name: str) -> None:
        self.name = name

    def __del__(self) -> None:
        print("gone", self.name)


first = Named("first")
_private = Named("private")
second = Named("second")
third = Named("third")
print("end of main")
