"""Messages, transport, clients, configuration and checkpoints: the parts that processes share."""
