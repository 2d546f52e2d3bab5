"""Commands that simulate and plan: plan, simulate, rehearse."""
