"""Tables out of tables: each function takes tables and returns new ones, and says what it changed or left out."""
