assert 1 == 2, "numbers"  # noqa: PLR0133
