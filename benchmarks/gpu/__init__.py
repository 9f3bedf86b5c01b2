"""The campaign for a machine with a GPU: what runs there, how long it takes, and what it writes. See `__main__`."""
