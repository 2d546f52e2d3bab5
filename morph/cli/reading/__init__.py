"""Reading what the user gave, and how errors leave."""
