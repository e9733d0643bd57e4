"""Sockets, channels, discovery, encryption and heartbeats."""
