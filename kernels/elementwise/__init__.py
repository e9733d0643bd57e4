"""RMSNorm, activation and embedding lookup."""
