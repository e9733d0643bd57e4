"""Admission: checks and limits of requests and connections, and the ledger of open requests."""
