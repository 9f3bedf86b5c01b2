"""Measurements of the service against its targets and its peers. Run each as `python -m benchmarks.<name>`."""
