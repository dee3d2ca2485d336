"""Which strategy every operator gets, searched for: problems of priced choices, and ways to solve them. Pure."""
