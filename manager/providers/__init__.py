"""Where VMs come from. Cloud SDKs are imported here alone, and only inside the provider that needs one."""
