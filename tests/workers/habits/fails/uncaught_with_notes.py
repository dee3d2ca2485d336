error = ValueError("two\nlines")
error.add_note("a note")
raise error from KeyError("cause")
