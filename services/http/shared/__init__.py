"""Parts of every API: access, bodies, errors, event streams, and the state of each model."""
