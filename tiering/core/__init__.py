"""The pure core: events in, replies and commands out. No clock, lock, log, thread, asyncio, torch or random."""
