"""Measures how effective the cache is: plays a trace of requests through simulated nodes, which run the real eviction,
directory and routing.

Pure computing on one thread; only `trace.read_trace` reads a file.
"""
