"""Agreeing on who trains: a pure state machine, the same live and explored."""
