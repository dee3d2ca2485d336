"""Looking at a job from outside, and ending it."""
