"""Networks: deferred initialisation, and a network joined with its loss."""
