"""Commands that a pipeline does not need: batches, checkpoints on this machine, tuning."""
