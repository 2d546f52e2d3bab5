"""What a job on spot VMs can do about their coming and going: Morph, and what it is compared with."""
