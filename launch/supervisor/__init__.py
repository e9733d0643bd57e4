"""The supervisor of a pipeline's processes."""
