"""The gateway: admission control, routing, and delivery of output to clients."""
