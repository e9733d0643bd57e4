"""Messages between processes: a module for each hop, and modules of what several have."""
