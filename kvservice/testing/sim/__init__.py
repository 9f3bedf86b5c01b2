"""A deterministic simulator: the production core under virtual time, with everything around it simulated.

`schedule.make_schedule(seed)` decides what happens when; `run.run_schedule(schedule)` plays it and reports what went
wrong. The same seed gives the same events, to the last one. Real are PoolRuntime with ShardState, AnnouncePump,
Directory, SchedulerHalf and Session, slabs, slot headers and payload digests, and the checks of a pull and of a load.
Simulated are clocks, event loops, the network and the calls over it, payloads, and the engine around its scheduler
half. (The idea is FoundationDB's: Zhou et al., SIGMOD 2021, section 4.)
"""
