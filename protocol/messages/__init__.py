"""Messages between processes, one module a hop."""
