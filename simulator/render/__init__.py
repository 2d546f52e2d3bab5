"""Plans and simulations as lines, tables and pictures."""
