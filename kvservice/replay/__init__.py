"""Effectiveness: a trace of requests, played through simulated nodes that run the real eviction, directory and routing.

Pure computing on one thread; only `trace.read_trace` reads a file.
"""
