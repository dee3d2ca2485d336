raise ExceptionGroup("several", [ValueError(1), ExceptionGroup("inner", [TypeError(2)])])
