"""The CUDA path on a driver that needs no GPU: `driver.c` stands in for libcuda.so.1, over host memory.

What it is good for: the order of copies, waits and events, addresses, errors, processes that die. What it cannot say:
how fast anything is, what a real kernel does, and whether a real driver does what its manual says.
"""
