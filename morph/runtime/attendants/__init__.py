"""What accompanies the steps of a worker: pre-copies, followers on other VMs (decision 0019), and checkpoints."""
