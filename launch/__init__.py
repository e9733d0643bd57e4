"""The command line, the supervisor, offline inference and benchmarks."""
