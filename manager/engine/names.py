"""Names that the manager and the process with the local Ray nodes share."""

VM_RESOURCE = "morph_vm_"
RAY_SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # Ray's own default of 15 lets anything else on the machine stop training
    "RAY_automatic_object_spilling_enabled": "0",  # it takes workers, which the head node has none of
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # a raylet that died refuses five looks within seconds; one that cannot be reached has almost a minute, for Morph's
    # own heartbeats know a lost node sooner, and tell it from a network that is gone
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "5",
}
"""Environment of every process of Ray, on every node."""
LOOPBACK = "127.0.0.1"
"""Of local Ray nodes; see ``ray_environment.stay_on_loopback``."""
