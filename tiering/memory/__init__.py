"""The primary tier's memory: the arena that holds its slots, and the transfer engines that fill and empty them."""
