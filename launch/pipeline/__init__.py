"""Shared parts of commands, supervisor and offline inference: files and sockets of a pipeline."""
