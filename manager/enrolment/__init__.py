"""How a VM of a provider gets its certificate for Ray's TLS from the manager of its run."""
