"""What a real device takes; see ``__main__``."""
