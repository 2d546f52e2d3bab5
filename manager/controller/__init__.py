"""The controller: ``decide(state, event, now_s)`` and the frozen values it works on. No I/O, clock or randomness."""
