"""Mini-batch simulator, planner and generators of profiles and traces. Pure: no torch, Ray, sockets or clock."""
