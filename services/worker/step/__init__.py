"""Steps: their records, the persistent batch, CUDA graphs and outputs."""
