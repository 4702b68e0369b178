"""Training drafters: data from the target itself, losses, the loop with its checkpoints, and
evaluation."""
