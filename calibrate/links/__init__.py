"""Links: messages, all-reduces and barriers, inside a machine and between two."""
