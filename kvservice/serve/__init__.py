"""Ray Serve: where requests go, and how an app is built with the cache in it."""
