"""A deterministic simulator: the production core under virtual time, with everything around it simulated.

`schedule.make_schedule(seed)` says what happens when; `run.run_schedule(schedule)` plays it and says what went wrong.
The same seed gives the same story, to the last event. What runs for real: PoolRuntime with ShardState, AnnouncePump,
Directory, SchedulerHalf and Session, slot headers and payload digests, the checks of a pull and of a load. What is
simulated: clocks, event loops, the network and the calls over it, shared memory, the engine around its scheduler half.
(The idea is FoundationDB's: Zhou et al., SIGMOD 2021, section 4.)
"""
