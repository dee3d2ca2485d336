"""Looking at running workers: progress, stacks, who waits for whom, who was killed for memory."""
