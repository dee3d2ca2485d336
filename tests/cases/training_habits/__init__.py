"""Habits of training scripts that nobody here wrote, in every mode: see trial.py."""

import importlib

from training_habits.trial import HABITS, MODES, Habit

for _module in ("losses", "writes", "results", "chains", "weights", "draws", "networks", "optimizers", "graphs"):
    importlib.import_module(f"training_habits.{_module}")

__all__ = ["HABITS", "MODES", "Habit"]
