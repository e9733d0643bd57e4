"""Parts shared by commands, supervisor and offline inference: files and sockets of a pipeline."""
