"""The replica of each request, by prefix and load."""
