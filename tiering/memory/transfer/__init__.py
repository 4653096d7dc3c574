"""Transfer engines: copies between the engine's device blocks and the arena's slots, one engine a direction."""
