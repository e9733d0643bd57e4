"""The commands of `launch`."""
