"""A captured graph and what the user wants, decided; and the local program that comes of it."""
