"""The gateway: the clients' socket and the ledger of open requests."""
