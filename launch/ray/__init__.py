"""The supervisor's processes on a Ray cluster; imported for `--backend ray` alone."""
