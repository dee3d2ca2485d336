import pkgutil

try:
    print(pkgutil.get_data("__main__", "no such file"))
except Exception as error:
    print(type(error).__name__)
