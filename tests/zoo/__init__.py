"""Models that nobody here wrote, trained in every mode: each must give the losses of one process, or be refused."""
