"""Ray actors of kvservice: shells around the pure core, one mailbox each. Import as kvservice.actors."""

if __name__ != "kvservice.actors":
    raise ImportError("import kvservice.actors, not the source folder 'actors'")
