"""Commands that are not necessary for a pipeline: batches, checkpoints on this machine, tuning."""
