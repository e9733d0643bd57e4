"""The supervisor's processes on a Ray cluster; imported only for `--backend ray`."""
