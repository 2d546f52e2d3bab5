"""What a worker trains, behind one interface."""
