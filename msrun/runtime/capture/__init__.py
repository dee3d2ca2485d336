"""capture: a network and one call of it become one graph of operators on global shapes, with what it depends on."""
