"""The user's side of parallelism: AutoParallel, its settings, its plan, multi-copy, gradients."""
