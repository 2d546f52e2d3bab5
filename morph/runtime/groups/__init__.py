"""Between the workers of one generation: process groups, their waits, and how both end."""
