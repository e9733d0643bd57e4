"""Peers: the group of workers, streams to detokenizers, and recovery when either is lost."""
