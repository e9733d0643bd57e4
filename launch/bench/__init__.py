"""`launch bench`: what a pipeline costs, and what it does, measured from a client."""
