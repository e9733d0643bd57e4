"""`launch chaos`: processes are killed in the middle of a load, and every answer is checked."""
