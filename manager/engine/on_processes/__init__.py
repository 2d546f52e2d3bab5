"""Workers as plain processes of this machine, without Ray."""
