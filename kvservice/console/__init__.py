"""`kvservice console`: a page in the browser that shows a service while it works. It reads, and changes nothing.

One gatherer asks the service, once a second while somebody watches, and tells every open page. So more viewers mean
no more work for any shard. `access` decides who may ask, `rates` turns counters into rates, `view` makes the data of
the page, `feed` gathers and tells, and `server` speaks HTTP. The service is asked through a `source`.
"""
