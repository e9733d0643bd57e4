"""The gateway: the clients' socket and the ledger of what they asked."""
