import no_such_module_as_this  # noqa: F401
