"""Commands about profiles: calibrate, profile."""
