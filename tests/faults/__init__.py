"""Attacks that once succeeded, each played again as a test.

Each file belongs to one kind of faults. Its tests start from the reproduction that broke the code and assert the rule
that was missing.
"""
