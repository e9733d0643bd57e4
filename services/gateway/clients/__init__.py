"""Clients' connections, and the socket that receives requests and delivers output."""
