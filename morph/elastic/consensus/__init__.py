"""How members agree on who trains: a pure state machine, the same code live and in the exhaustive tests."""
