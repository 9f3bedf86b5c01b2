"""The campaign for a machine with a GPU: what to run there, in what time, and what it writes. See `__main__`."""
