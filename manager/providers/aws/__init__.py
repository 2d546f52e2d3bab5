"""AWS: EC2 instances of instant fleets."""
