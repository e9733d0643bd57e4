"""What crosses a process border: messages, sockets, endpoints, configuration."""
