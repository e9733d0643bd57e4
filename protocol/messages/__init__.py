"""Messages between processes: one module for each hop, and modules that several hops share."""
