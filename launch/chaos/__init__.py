"""`launch chaos`: kills processes under load, and checks every answer."""
