"""One process each; they import protocol and never one another."""
