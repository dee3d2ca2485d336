"""Running a program: segments, collectives, parameters on their way to their use, gradients on their way back."""
