"""The reference engine: paged attention memory as code to read, to test and to measure. It is not for serving.

`blocks` and `schedule` decide and are pure.
"""
