"""The kinds of tables, loaded by `ranktable.kinds` by their modules' names: each has `DIALECTS`."""
