"""One job on VMs that come and go, played in virtual time by the controller of real runs."""
