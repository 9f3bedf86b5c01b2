"""`kvservice console`: a page in the browser that shows a service while it works. It reads, and changes nothing.

One gatherer asks the service, once a second while somebody watches, and tells every page that is open: more viewers
mean no more work for any shard. `access` decides who may ask, `history` makes rates of counters, `view` makes the data
of the page, `feed` gathers and tells, `server` speaks HTTP. What the service is asked through is a `source`.
"""
