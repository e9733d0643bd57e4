"""The command line, the supervisor, the client and the benchmarks."""
