"""Sources of VMs. Cloud SDKs are imported only here, and only inside the provider that needs one."""
