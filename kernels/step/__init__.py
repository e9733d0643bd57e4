"""The batch of a step, and its update on the device."""
