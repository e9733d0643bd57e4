"""The supervisor's processes on a Ray cluster; imported for `--on ray` alone."""
