"""The Ray actors of kvservice: thin shells around the pure core, one mailbox each. Import them as kvservice.actors."""

if __name__ != "kvservice.actors":
    raise ImportError("import kvservice.actors instead of the source folder 'actors'")
