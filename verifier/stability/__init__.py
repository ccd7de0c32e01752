"""Stability runs: the same prompts again, on one server or on two, and whether what differs is noise or a fault."""
