"""Parameter servers: parameters, and the state of their optimizers, that live in processes beside the workers."""
