print(__loader__.get_source("__main__")[:5], __loader__.is_package("__main__"))
