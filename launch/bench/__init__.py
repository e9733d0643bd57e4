"""`launch bench`: the costs and the performance of a pipeline, measured by a client."""
