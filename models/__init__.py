"""Models: their description, their layers over several ranks, and their weights."""
