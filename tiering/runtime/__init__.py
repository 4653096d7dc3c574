"""The shell around the core: the one lock, the I/O loop, queues, deadlines, retries and breakers."""
